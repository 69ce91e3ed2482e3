"""How a command ends: by Ctrl-C, by a reader that leaves. Real processes, the bundled model."""

from __future__ import annotations

import io
import signal
import subprocess
import sys

import pytest

from swiftlet_mlx.cli.app import app
from swiftlet_mlx.cli.run import run

# so hot that no end comes soon
ENDLESS = [sys.executable, "-m", "swiftlet_mlx", "generate", "demo", "--prompt", "x", "--temp", "3", "--seed", "1"]


def start(*more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*ENDLESS, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_command_says_so_and_exits_with_130(number: signal.Signals) -> None:
    process = start("--max-tokens", "2000", "--quiet")
    assert process.stdout is not None
    assert process.stdout.read(1) != b""
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.decode() == "swiftlet-mlx: interrupted\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    with start("--max-tokens", "2000", "--quiet") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) != b""
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


@pytest.mark.parametrize("command", [["generate", "demo", "--prompt", "\udcff hi"], ["chat", "demo", "\udcff hi"]])
def test_an_argument_that_is_no_utf_8_is_read_as_well_as_it_can_be(command: list[str]) -> None:
    assert run(app, [*command, "--max-tokens", "2", "--quiet"]) == 0  # Python hands such bytes over as lone surrogates


def test_what_the_system_refuses_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["info", "a" * 5000]) == 1
    said = capsys.readouterr().err
    assert said.startswith("swiftlet-mlx: aaa")
    assert said.endswith("File name too long\n")
    assert len(said) < 300


def test_standard_input_that_is_no_text_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"))
    assert run(app, ["generate", "demo", "--prompt", "-"]) == 2
    assert "standard input is not text in utf-8: invalid start byte at byte 2" in capsys.readouterr().err
