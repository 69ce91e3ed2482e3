"""The examples run as they stand, on a tiny model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"
TESTED = {"embed.py", "gui.py", "cancel.py", "resume.py"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("example") / "model", "qwen3_next", tokenizer=True))


def run(name: str, *arguments: Any) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(*arguments)


def test_every_example_is_tested() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == TESTED


def test_embed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("embed", model)
    counts = re.findall(r"\[\d+ tokens, (\d+) of the prompt were cached\]", capsys.readouterr().out)
    assert len(counts) == 2
    assert int(counts[1]) > int(counts[0]), "the second question goes on where the first ended"


def test_gui(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("gui", model)
    out = capsys.readouterr().out
    assert "[the window stays alive]" in out
    assert re.search(r"\[(stop|length)\]", out)


def test_cancel(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("cancel", model, 0.2)
    out = capsys.readouterr().out
    assert re.match(r"\[(cancelled|stop)\]", out)
    assert re.search(r"\[[1-9]\d* of \d+ prompt tokens were cached\]", out)


def test_resume(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "talk.session")
    run("resume", model, file)
    first = int(re.findall(r"\[(\d+) tokens had", capsys.readouterr().out)[0])
    run("resume", model, file)
    out = capsys.readouterr().out
    assert "[3 messages so far]" in out
    assert int(re.findall(r"\[(\d+) tokens had", out)[0]) < first + 40
