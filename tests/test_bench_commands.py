"""The commands of the benchmark, what they print, and the pictures they draw."""

from __future__ import annotations

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from bench_models import tiny
from swiftlet_bench import page, plot, rates, shapes
from swiftlet_bench.cli import app
from swiftlet_bench.rates import Rates
from swiftlet_bench.timeline import Span, Timeline
from typer.main import get_command

from swiftlet_mlx.cli import left_open
from swiftlet_mlx.cli.app import app as product
from swiftlet_mlx.cli.info import describe
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.cli.running import engine_for
from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.locate import demo_folder

RATES = Rates(weights=100e9, read_back=0.3e-3)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("bench"))


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


def test_info_says_what_the_commands_do_and_predicts_with_its_formula(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_: RATES)
    words = ["info", "demo", "--predict", "--disk-gb-s", "3"]
    assert run(product, words) == 0
    text = capsys.readouterr().out
    assert "seconds a token = " in text
    assert "assumed" in text
    assert run(product, [*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cache_bytes"] <= left_open.DEMO_CACHE_GB * 1e9 < said["cache_bytes"] + said["expert_bytes"]
    assert said["reads"].startswith("cached")
    found = said["prediction"]["predictions"]
    assert said["cache_bytes"] in [p["cache_bytes"] for p in found]
    assert found[-1]["cache_bytes"] == said["all_experts_bytes"]
    assert [p["tokens_per_second"] for p in found] == sorted(p["tokens_per_second"] for p in found)


def test_what_chat_and_bench_use_for_the_demo_is_what_info_says(container: Path) -> None:
    facts = describe(str(demo_folder()), None)
    with engine_for("demo", cache_gb=None, quiet=True, warm=False) as (engine, _):
        assert engine.model.pools.nbytes == facts["cache_bytes"] < facts["all_experts_bytes"]
    assert left_open.cache_gb_for(container, None) is None
    assert left_open.cache_gb_for(demo_folder(), 0.001) == 0.001


def test_bench_predicts_with_assumed_and_measured_hits(
    container: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_: RATES)
    words = ["bench", str(container), "--prompt-tokens", "4", "--max-tokens", "3", "--rounds", "1", "--warm-up", "0"]
    assert run(product, [*words, "--cache-gb", "0.0002", "--predict", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "measured" in text
    assert text.count("assumed") == 1
    assert "seconds a token = " in text


def test_the_timeline_of_a_token_adds_up(container: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["timeline", str(container), "--cache-gb", "0.00012", "--max-tokens", "12", "--json"]
    said = json.loads(command(capsys, *words))
    spans, seconds = said["spans"], said["seconds"]
    layers = 4
    assert sum(span["kind"] == "evaluate" for span in spans) >= layers
    assert all(0 <= span["start"] <= span["end"] <= seconds for span in spans)
    mine = sorted((s["start"], s["end"]) for s in spans if s["kind"] != "read")
    assert all(end <= start for (_, end), (start, _) in pairwise(mine))  # the engine thread does one thing at a time
    parts = ("evaluating", "waiting for reads", "host work and the rest")
    assert sum(said["sums"][name] for name in parts) == pytest.approx(seconds)
    assert "--max-tokens" in command(capsys, *words[:-2], "5", code=2)


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


def test_every_program_is_reached_by_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["swiftlet_bench"])  # which programs read their arguments from
    monkeypatch.delitem(sys.modules, "swiftlet_bench.policy", raising=False)
    with pytest.raises(SystemExit, match="0"):
        run(app, ["policy", "--help"])
    assert "swiftlet_bench.policy" in capsys.readouterr().out


def test_pictures_are_drawn_or_the_extra_is_named(container: Path, tmp_path: Path) -> None:
    rows, _ = page.measure(container, page.Plan(lengths=(4, 8), tokens=3, rounds=1, warm_up=0), cache_gb=0.0001)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(OptionError, match="plot"):
            plot.page(rows, tmp_path / "a.png")
        return
    plot.page(rows, tmp_path / "a.svg")
    plot.cache_curve(rows[:1], tmp_path / "b.svg")
    token = Timeline(
        0.003, (Span("evaluate", 0.0, 0.001, 0), Span("wait", 0.001, 0.002, 0), Span("read", 0.0, 0.002, 0))
    )
    plot.timeline(rows[0].setting, token, tmp_path / "c.svg")
    for name in ("a.svg", "b.svg", "c.svg"):
        assert "random weights" in (tmp_path / name).read_text()
    with pytest.raises(OptionError, match="svg"):
        plot.page(rows, tmp_path / "a.nonsense")
