"""Measuring: counters that are the same on every machine, reads, memory, predictions, and the commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from swiftlet_bench import (
    cache_curve,
    children,
    compare,
    io,
    machine,
    page,
    pagecache,
    plot,
    predict,
    process,
    prompts,
    rates,
    shapes,
    variants,
)
from swiftlet_bench.cli import app
from swiftlet_bench.endpoint import Endpoint, EndpointFailed
from swiftlet_bench.harness import Spread
from swiftlet_bench.rates import Rates
from swiftlet_bench.subject import Subject, opened
from swiftlet_bench.synthetic import make_checkpoint, make_container
from typer.main import get_command

from swiftlet_mlx import memory
from swiftlet_mlx.cli.app import app as product
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.errors import OptionError, ReadFailed
from swiftlet_mlx.locate import find_model
from swiftlet_mlx.policy import LFU

TINY: dict[str, Any] = {"config": shapes.preset("tiny"), "group_size": 32, "dtype": mx.float32, "tokenizer": True}


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_container(tmp_path_factory.mktemp("bench") / "tiny.qpack", **TINY)


@pytest.fixture(scope="module")
def demo() -> Path:
    return find_model("demo")


# ---- counters that depend on no machine


class Replay:
    """What a layer's cache must do with the recorded choices: the expectation is computed, not written down."""

    def __init__(self, n_slots: int) -> None:
        self.policy, self.n_slots = LFU(), n_slots
        self.misses = self.evictions = 0

    def step(self, experts: list[int]) -> None:
        self.policy.use(experts)
        missing = [e for e in experts if e not in self.policy.residents]
        self.misses += len(missing)
        free = self.n_slots - len(self.policy.residents)
        for _ in range(len(missing) - free):
            self.policy.evict(set(experts))
            self.evictions += 1
        for expert in missing:
            self.policy.add(expert)


def decode_and_replay(subject: Subject, n_tokens: int) -> tuple[dict[str, float], Counter[str]]:
    """Decode from an empty pool, beside a replay of the same choices. The prompt is one token: no prefill."""
    pools = subject.pools
    replays = {layer: Replay(pool.n_slots) for layer, pool in pools.layers.items()}
    pools.recorder = lambda layer, experts: replays[layer].step(list(experts))
    before = pools.stats.copy()
    subject.run(subject.prompt(1), n_tokens)
    done = pools.stats.since(before)
    found = {name: getattr(done, name) for name in ("misses", "evictions", "reads", "read_bytes", "read_backs")}
    expected: Counter[str] = Counter()
    for layer, replay in replays.items():
        expected["misses"] += replay.misses
        expected["reads"] += replay.misses
        expected["evictions"] += replay.evictions
        expected["read_bytes"] += replay.misses * pools.layers[layer].table.payload_bytes
        expected["read_backs"] += n_tokens
    return found, expected


@pytest.mark.parametrize("model", ["container", "demo"])
@pytest.mark.parametrize("slots_a_layer", [4, 7])
def test_decoding_reads_back_evicts_and_reads_exactly_what_the_routes_demand(
    model: str, slots_a_layer: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    shape = predict.shape_here(folder)
    budget = shape.layers * slots_a_layer * shape.expert_bytes / memory.GB
    with opened(folder, cache_gb=budget) as subject:
        assert {p.n_slots for p in subject.pools.layers.values()} == {slots_a_layer}
        found, expected = decode_and_replay(subject, 24)
    assert found == expected
    assert found["evictions"] > 0


def test_a_resident_model_reads_nothing_and_never_asks_for_the_routers_choice(demo: Path) -> None:
    with opened(demo, cache_gb=1) as subject:
        values = subject.run(subject.prompt(16), 8)
        assert subject.sizes()["cache_slots"] == subject.sizes()["all_experts"] == 384
    for name in ("read_backs_per_token", "reads_per_token", "read_bytes_per_token", "evictions_per_token"):
        assert values[name] == 0, name
    assert values["prefill_read_bytes"] == 0
    assert values["hit_rate"] == 1


@pytest.mark.parametrize("length", [40, 160])
def test_a_prompt_reads_each_expert_at_most_once_whatever_its_length(demo: Path, length: int) -> None:
    shape = predict.shape_here(demo)
    with opened(demo, cache_gb=8 * 8 * shape.expert_bytes / memory.GB) as subject:
        values = subject.run(subject.prompt(length), 1)
        last_token = shape.cycle_bytes  # decoded for the first token of the reply, with its own choice
    assert 0 < values["prefill_read_bytes"] <= shape.all_experts_bytes + last_token
    assert values["prefill_read_bytes"] % shape.expert_bytes == 0


# ---- a subject


def test_a_run_generates_as_many_tokens_as_asked_and_reports_its_own_share(container: Path) -> None:
    with opened(container, cache_gb=0.0001) as subject:
        first, second = (subject.run(subject.prompt(20, seed), 12) for seed in (1, 1))
        setting = subject.setting(subject.prompt(20, 1), 12, 2, 0)
    for values in (first, second):
        assert values["generated_tokens"] == 12
        assert values["ttft_seconds"] > 0
        assert values["peak_bytes"] > 20e6
        assert values["p95_token_seconds"] <= values["slowest_token_seconds"]
        assert values["read_backs_per_token"] == 4
        assert 0 <= values["hit_rate"] < 1
    assert len(subject.last_ids) == 12
    assert setting.cache_bytes <= 100_000
    assert setting.prompt_hash == prompts.digest(subject.prompt(20, 1)) != prompts.digest(subject.prompt(20, 2))
    assert setting.synthetic


def test_stock_mlx_lm_is_measured_the_same_way_and_says_the_same(tmp_path: Path, container: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "stock", **TINY)
    said = []
    for folder, stock in ((checkpoint, True), (container, False)):
        with opened(folder, cache_gb=0.00005, stock=stock) as subject:
            values = subject.run(subject.prompt(16), 10)
            said.append(subject.last_ids)
            assert subject.setting([1], 1, 1, 0).engine == ("mlx-lm" if stock else "swiftlet-mlx")
            assert values["decode_tokens_per_second"] > 0
    assert said[0] == said[1]
    with pytest.raises(OptionError, match="checkpoint"), opened(container, stock=True):
        pass


def test_a_page_measures_every_length_and_decoding_in_turn(container: Path) -> None:
    order: list[str] = []
    rows, sizes = page.measure(
        container,
        page.Plan(lengths=(8, 24), tokens=6, rounds=2, warm_up=1),
        cache_gb=0.0002,
        progress=lambda done, total, what: order.append(what),
    )
    assert order == [*["decode", "prefill 8", "prefill 24"] * 3, "done"]
    assert [row.case for row in rows] == ["decode", "prefill 8", "prefill 24"]
    assert [row.setting.prompt_tokens for row in rows] == [32, 8, 24]
    assert all(row.values["ttft_seconds"].n == 2 for row in rows)
    assert sizes["expert_bytes"] == predict.shape_here(container).expert_bytes


# ---- the machine


def test_the_machine_is_described_without_naming_its_owner() -> None:
    here = machine.machine()
    assert here.cores == os.cpu_count()
    assert here.memory_bytes > 1e8
    assert here.backend == "cpu"
    assert here.slug == here.slug.lower()
    assert " " not in here.slug
    import platform

    assert platform.node() not in str(here) or not platform.node()
    assert machine.versions()["mlx"].startswith("0.")
    assert machine.commit()


def test_the_peak_of_a_process_can_be_reset_and_sees_an_allocation() -> None:
    if not process.reset_peak():
        pytest.skip("this system cannot reset a process's peak")
    before = process.peak_bytes()
    block = bytearray(60_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert process.peak_bytes() > before + 50_000_000
    del block
    assert process.now_bytes() < before + 30_000_000
    process.reset_peak()
    assert process.peak_bytes() < before + 30_000_000


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
def test_a_model_is_dropped_from_the_page_cache_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(3_000_000))
    try:
        pagecache.evict(tmp_path)
    except pagecache.CannotEvict:
        pytest.skip("this file system keeps its files in memory")
    assert pagecache.cached_share(tmp_path) == 0
    assert pagecache.state(0) == "cold"
    path.read_bytes()
    assert pagecache.cached_share(tmp_path) == 1
    assert [pagecache.state(x) for x in (1.0, 0.5, None)] == ["warm", "part", "unknown"]


def test_prompts_are_the_same_everywhere_and_differ_by_seed() -> None:
    assert prompts.digest(prompts.ids(50, 1000, None, 1)) == "3b9fc4eb06d7"
    assert prompts.text(12).endswith(".")
    assert prompts.text(40, 1) != prompts.text(40, 2)
    assert len(prompts.ids(7, 10)) == 7
    assert max(prompts.ids(500, 10)) < 10


# ---- the disk


def test_io_reads_no_byte_twice_and_reports_every_combination(tmp_path: Path) -> None:
    with io.sample_file(tmp_path, 4_000_000) as path:
        results = io.measure(path, sizes=(65_536, 262_144), threads=(1, 2), rounds=2, case_bytes=1_000_000)
        assert {(r.case.read_bytes, r.case.threads, r.case.cold) for r in results} == {
            (size, n, cold) for size in (65_536, 262_144) for n in (1, 2) for cold in (True, False)
        }
        assert all(r.bytes_per_second.low > 0 and r.bytes_per_second.n == 2 for r in results)
        assert all(r.median_seconds.low <= r.p99_seconds.high for r in results)
        assert io.bandwidth(results, 300_000) > 0
        with pytest.raises(ReadFailed, match="larger file"):
            io.measure(path, sizes=(1 << 30,), threads=(1,), rounds=1)
    assert not path.exists()
    with pytest.raises(ValueError):
        io.bandwidth([], 1)


# ---- predictions


RATES = Rates(weights=100e9, read_back=0.3e-3)


def test_a_prediction_is_the_sum_of_its_terms() -> None:
    shape = predict.shape_of("qwen3.6-35b", shapes.preset("qwen3.6-35b"))
    p = predict.predict(shape, 4 * 10**9, RATES, disk=5e9)
    assert p.compute_seconds == pytest.approx((shape.dense_bytes + shape.cycle_bytes) / 100e9)
    assert p.host_seconds == pytest.approx(40 * (0.3e-3 + predict.HOST_SECONDS))
    assert p.read_seconds == pytest.approx(shape.cycle_bytes * (1 - p.hit_rate) / 5e9)
    assert p.tokens_per_second == pytest.approx(1 / (p.compute_seconds + p.host_seconds + p.read_seconds))


def test_more_cache_never_predicts_less_and_everything_resident_reads_nothing() -> None:
    shape = predict.shape_of("qwen3-next-80b", shapes.preset("qwen3-next-80b"))
    found = [predict.predict(shape, n * 10**9, RATES, 3e9) for n in (1, 2, 4, 8, 16, 32, 64)]
    speeds = [p.tokens_per_second for p in found]
    assert speeds == sorted(speeds)
    assert found[-1].read_bytes == 0
    assert found[-1].host_seconds == RATES.read_back


@pytest.mark.parametrize(("x", "y"), [(0, 0), (0.25, 0.5), (0.5, 1), (0.9, 1)])
def test_the_curve_is_read_between_its_points(x: float, y: float) -> None:
    assert predict.interpolate([(0.0, 0.0), (0.5, 1.0)], x) == pytest.approx(y)


def test_a_shape_from_files_agrees_with_the_shape_from_the_config(container: Path) -> None:
    here = predict.shape_here(container)
    said = predict.shape_of("tiny", TINY["config"], bits=4, group_size=32)
    assert (here.layers, here.experts, here.top_k) == (said.layers, said.experts, said.top_k)
    assert here.expert_bytes == 3 * 64 * 32 * (4 / 8 + 8 / 32)  # float32 scales and biases
    assert predict.width_here(container) == (4, "F32")


def test_rates_are_of_the_size_of_the_work() -> None:
    small = rates.weight_rate(4, mx.float32, 2 << 20)
    assert 1e6 < small < 1e13
    assert 0 < rates.read_back_seconds(5) < 1


# ---- engines side by side


class FakeServer(BaseHTTPRequestHandler):
    """Streams three tokens, as a server with OpenAI's API does."""

    requests: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._say(json.dumps({"data": [{"id": "fake"}]}).encode())

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.requests[-1]["prompt"] == "refuse":
            self.send_error(400)
            return
        events: list[dict[str, Any]] = [{"choices": [{"text": t}]} for t in "abc"]
        if self.requests[-1]["prompt"] != "uncounted":
            events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        self._say("".join(f"data: {json.dumps(e)}\n\n" for e in events).encode() + b"data: [DONE]\n\n")

    def _say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    FakeServer.requests.clear()
    served = HTTPServer(("127.0.0.1", 0), FakeServer)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}/v1"
    served.shutdown()
    thread.join()
    served.server_close()


def test_a_server_is_measured_by_its_own_count_of_tokens(server: str) -> None:
    values, prompt_tokens = Endpoint(server).complete("hello", 3)
    assert prompt_tokens == 5
    assert values["generated_tokens"] == 3
    assert values["ttft_seconds"] > 0
    sent = FakeServer.requests[-1]
    assert (sent["model"], sent["temperature"], sent["stream"]) == ("fake", 0, True)


@pytest.mark.parametrize("prompt", ["refuse", "uncounted"])
def test_a_server_that_refuses_or_does_not_count_is_an_error(server: str, prompt: str) -> None:
    with pytest.raises(EndpointFailed):
        Endpoint(server).complete(prompt, 3)


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EndpointFailed, match="cannot be reached"):
        Endpoint("http://127.0.0.1:9/v1").name()


def test_engines_are_compared_round_by_round_on_the_same_prompts(
    container: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(container, cache_gb=0.0001) as subject:  # in this process: a child takes seconds to start

        def one(folder: Path, *, max_tokens: int, more: tuple[str, str], **_: object) -> children.Answer:
            ids = json.loads(Path(more[1]).read_text())
            values = subject.run(ids, max_tokens)
            return children.Answer(subject.setting(ids, max_tokens, 1, 1), values, prompts.digest(subject.last_ids))

        monkeypatch.setattr(children, "one", one)
        found = compared(container, server, tmp_path)
    assert [row.case for row in found.rows] == ["swiftlet-mlx, 100 kB", "served", "other"]
    ours, served, other = found.rows
    assert other.values["decode_tokens_per_second"].values == (9.0,)
    assert found.ratios["other"].values[0] == 9 / ours.values["decode_tokens_per_second"].values[0]
    assert served.setting.prompt_tokens == 5
    assert other.setting.versions == "x=1"
    assert other.setting.commit == ours.setting.commit
    assert found.same_output == {"swiftlet-mlx, 100 kB": True, "other": False}
    assert len(FakeServer.requests) == 2  # a warm-up round and one that counts


def compared(container: Path, server: str, tmp_path: Path) -> compare.Compared:
    program = tmp_path / "engine.py"
    program.write_text(
        "import json, sys; ids = json.load(open(sys.argv[1]));"
        "print(json.dumps({'decode_tokens_per_second': float(len(ids)), 'ids': ids, 'version': 'x=1'}))"
    )
    return compare.measure(
        container,
        cache_gb=[0.0001],
        urls={"served": Endpoint(server)},
        programs={"other": f"{sys.executable} {program} {{ids}} {{tokens}}"},
        prompt_tokens=9,
        max_tokens=4,
        rounds=1,
    )


def test_a_comparison_of_one_and_a_failing_program_are_errors(container: Path) -> None:
    with pytest.raises(OptionError, match="two engines"):
        compare.measure(container, cache_gb=[1])
    with pytest.raises(children.ChildFailed, match="exit code 3"):
        children.answer([sys.executable, "-c", "import sys; print('no', file=sys.stderr); sys.exit(3)"])
    for said in ("hello", "[1]", ""):
        with pytest.raises(children.ChildFailed, match="JSON"):
            children.answer([sys.executable, "-c", f"print({said!r})"])
    with pytest.raises(children.ChildFailed, match="could not be run"):
        children.answer(["/no/such/program"])


def test_a_cache_curve_goes_from_the_least_to_everything(container: Path, tmp_path: Path) -> None:
    budgets = cache_curve.budgets(container, (0.5, 1.0))
    shape = predict.shape_here(container)
    assert budgets == sorted(budgets)
    assert round(budgets[0] * 1e9) - 1 == shape.layers * shape.expert_bytes
    rows = cache_curve.measure(container, [budgets[0], budgets[-1]], prompt_tokens=4, max_tokens=6, rounds=1)
    curve = cache_curve.curve(rows, shape.all_experts_bytes)
    assert curve[0] == (0, 0)
    assert curve[-1] == (1, 1)
    assert rows[0]["hit_rate"] < rows[1]["hit_rate"] == 1
    assert rows[0]["peak_bytes"] > 0


def test_a_variant_is_recommended_only_if_it_always_wins_with_the_same_output() -> None:
    def tried(name: str, *times: float, same: bool = True) -> variants.Tried:
        return variants.Tried(name, {"MLX_METAL_FAST_SYNCH": name}, Spread(times), Spread(times), same)

    shipped = tried("0", 1.0, 1.0, 1.0)
    assert variants.recommended([shipped, tried("1", 1.2, 0.99, 1.2)]) == {}
    assert variants.recommended([shipped, tried("1", 1.02, 1.02, 1.02)]) == {}
    assert variants.recommended([shipped, tried("1", 1.2, 1.2, 1.2, same=False)]) == {}
    assert variants.recommended([shipped, tried("1", 1.1, 1.1), tried("2", 1.3, 1.2)]) == {"MLX_METAL_FAST_SYNCH": "2"}


# ---- commands


def command(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    found = run(app, list(words))
    out, err = capsys.readouterr()
    assert found == code, err
    assert "Traceback" not in err
    return out if code == 0 else err


def test_bench_prints_a_page_json_a_block_and_appends_rows(
    container: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", str(container), "--prompt-tokens", "8", "--max-tokens", "4", "--rounds", "1", "--quiet"]
    words += ["--cache-gb", "0.0002", "--warm-up", "0"]
    text = command(capsys, *words)
    assert "synthetic (random weights)" in text
    assert "prefill 8" in text
    said = json.loads(command(capsys, *words, "--json", "--csv", str(tmp_path)))
    assert [case["case"] for case in said["cases"]] == ["decode", "prefill 8"]
    assert (tmp_path / f"{said['machine']}.csv").exists()
    assert command(capsys, *words, "--share").startswith("```\nswiftlet-mlx bench")
    table = command(capsys, "table", "--results", str(tmp_path))
    assert "tiny.qpack, synthetic" in table


def test_tables_in_documents_are_made_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    document = tmp_path / "R.md"
    document.write_text("x\n<!-- results: begin -->\n<!-- results: end -->\n")
    words = ["table", "--results", str(tmp_path / "results"), "--into", str(document)]
    assert "differs" not in command(capsys, *words, "--check", code=1)
    command(capsys, *words)
    command(capsys, *words, "--check")
    assert "| machine |" in document.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "demo", "--prompt-tokens", "1"],
        ["bench", "demo", "--prompt-tokens", "x"],
        ["bench", "demo", "--io", "fast"],
        ["cache-curve", "demo", "--cache-gb", "x"],
        ["compare", "demo", "--cache-gb", "1"],
        ["compare", "demo", "--program", "nameless"],
        ["predict", "--cache-gb", "x"],
        ["io", "--threads", "0"],
        ["synthetic", "--preset", "tiny", "--output", "x", "--bits", "5"],
    ],
)
def test_wrong_usage_is_one_plain_message_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, *words, code=2).startswith(("swiftlet-mlx: ", "Usage"))


def test_predict_io_and_synthetic_run_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure", lambda: RATES)
    said = json.loads(command(capsys, "predict", "--disk-gb-s", "3", "--json"))
    assert [m["name"] for m in said["models"]] == list(shapes.RELEASED)
    assert "seconds a token" in command(capsys, "predict", "qwen3.6-35b", "--disk-gb-s", "3")
    out = command(
        capsys, "io", "--folder", str(tmp_path), "--gb", "0.02", "--read-bytes", "65536", "--threads", "1", "--rounds",
        "1", "--json", "--quiet",
    )  # fmt: skip
    assert len(json.loads(out)["cases"]) == 2
    command(capsys, "synthetic", "--preset", "tiny", "--layers", "2", "--output", str(tmp_path / "x.qpack"), "--quiet")
    assert (tmp_path / "x.qpack" / "manifest.json").exists()


def shown_commands() -> list[str]:
    text = (Path(__file__).parent.parent / "bench" / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("line", shown_commands())
def test_the_commands_of_the_page_exist_with_these_options(line: str) -> None:
    """They take minutes; that their words are understood is what can be tested in time."""
    words = shlex.split(line.replace("python -m swiftlet_bench", "swiftlet_bench"))
    group = get_command(app if words[0] == "swiftlet_bench" else product)
    assert words[0] in ("swiftlet_bench", "swiftlet-mlx")
    group.commands[words[1]].make_context(words[1], words[2:])  # type: ignore[attr-defined]


def test_every_program_is_reached_by_its_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swiftlet_bench", "policy", "--help"], capture_output=True, text=True, check=True
    )
    assert "swiftlet_bench.policy" in done.stdout


def test_pictures_are_drawn_or_the_extra_is_named(container: Path, tmp_path: Path) -> None:
    rows, _ = page.measure(container, page.Plan(lengths=(4, 8), tokens=3, rounds=1, warm_up=0), cache_gb=0.0001)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(OptionError, match="plot"):
            plot.prefill_curve(rows, tmp_path / "a.png")
        return
    plot.page(rows, tmp_path / "a.svg")
    plot.cache_curve(rows[:1], tmp_path / "b.svg")
    for name in ("a.svg", "b.svg"):
        assert "random weights" in (tmp_path / name).read_text()
    with pytest.raises(OptionError, match="svg"):
        plot.prefill_curve(rows, tmp_path / "a.nonsense")
