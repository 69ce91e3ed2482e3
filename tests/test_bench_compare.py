"""Engines, budgets and settings side by side: in turn, on the same prompts, each measured as it can be."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bench_models import tiny
from swiftlet_bench import cache_curve, children, compare, predict, prompts, variants
from swiftlet_bench.endpoint import Endpoint, EndpointFailed
from swiftlet_bench.harness import Spread
from swiftlet_bench.subject import opened

from swiftlet_mlx.errors import OptionError


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("bench"))


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
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
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
    assert (other.setting.versions, other.setting.cache_bytes) == ("x=1", 77)
    assert "cache_bytes" not in other.values
    assert other.setting.commit == ours.setting.commit
    assert found.same_output == {"swiftlet-mlx, 100 kB": True, "other": False}
    assert len(FakeServer.requests) == 2  # a warm-up round and one that counts


def compared(container: Path, server: str, tmp_path: Path) -> compare.Compared:
    program = tmp_path / "engine.py"
    program.write_text(
        "import json, sys; ids = json.load(open(sys.argv[1]));"
        "said = {'decode_tokens_per_second': float(len(ids)), 'ids': ids, 'version': 'x=1', 'cache_bytes': 77};"
        "print(json.dumps(said))"
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


def in_this_process(
    folder: Path, *, cache_gb: float, prompt_tokens: int, max_tokens: int, seed: int, **_: object
) -> children.Answer:
    """A child's answer without the seconds a process takes to start."""
    with opened(folder, cache_gb=cache_gb) as subject:
        ids = subject.prompt(prompt_tokens, seed)
        values = subject.run(ids, max_tokens)
        values |= {"load_seconds": subject.load_seconds, "load_peak_bytes": subject.load_peak_bytes}
        return children.Answer(subject.setting(ids, max_tokens, 1, 1), values, prompts.digest(subject.last_ids))


@pytest.mark.long
def test_a_child_measures_what_this_process_measures(container: Path) -> None:
    wanted: dict[str, Any] = {"cache_gb": 0.0001, "prompt_tokens": 6, "max_tokens": 5, "seed": 3}
    there, here = children.one(container, **wanted), in_this_process(container, **wanted)
    assert there.output == here.output
    assert there.setting.prompt_hash == here.setting.prompt_hash
    assert set(there.values) == set(here.values)
    exact = ("read_bytes_per_token", "evictions_per_token", "read_backs_per_token", "prefill_read_bytes", "hit_rate")
    assert [there.values[name] for name in exact] == [here.values[name] for name in exact]


def test_a_cache_curve_goes_from_the_least_to_everything(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = cache_curve.budgets(container, (0.5, 1.0))
    shape = predict.shape_here(container)
    assert budgets == sorted(budgets)
    assert round(budgets[0] * 1e9) - 1 == shape.layers * shape.expert_bytes
    monkeypatch.setattr(children, "one", in_this_process)
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
