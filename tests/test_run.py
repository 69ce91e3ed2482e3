"""How a command ends: by Ctrl-C, by a reader that leaves. Real processes, the bundled model."""

from __future__ import annotations

import errno
import io
import re
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


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_command_says_so_and_exits_with_130(number: signal.Signals) -> None:
    process = start("--max-tokens", "2000", "--quiet")
    assert process.stdout is not None
    assert process.stdout.read(1) != b""
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.decode() == "swiftlet-mlx: interrupted\n"


def test_interrupted_is_said_on_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object, **__: object) -> bool:
        print("Delete it? ^C", end="", file=sys.stderr)  # the question, and what a terminal shows of Ctrl-C
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("swiftlet_mlx.locate.find_model", ask)
    assert run(app, ["info", "demo"]) == 130
    assert capsys.readouterr().err == "Delete it? ^C\nswiftlet-mlx: interrupted\n"


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("closed", "command", "code", "said"),
    [
        ("stdin", ["generate", "demo", "--prompt", "-"], 2, "The prompt is empty"),
        ("stdin", ["chat", "demo"], 0, "demo: a small model"),
        ("stdout", ["info", "demo"], 0, ""),
        ("stderr", ["info", "nonesuch"], 1, ""),
    ],
)
def test_a_standard_stream_that_the_caller_closed_is_no_fault(
    closed: str, command: list[str], code: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, closed, None)  # what Python makes of a closed one
    assert run(app, command) == code
    getattr(sys, closed).close()
    monkeypatch.undo()
    shown = capsys.readouterr().err
    assert said in shown
    assert "unexpected" not in shown


def test_wrong_usage_is_told_in_one_line_with_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    for option, found in (("--temp", "hot"), ("--max-tokens", "0"), ("--temp", "9"), ("--top-q", "1")):
        assert run(app, ["generate", "demo", "--prompt", "x", option, found]) == 2
        said = capsys.readouterr().err
        assert re.fullmatch(rf"swiftlet-mlx: .*{option}.*\n", said), said
        assert found in said or option == "--top-q"


@pytest.mark.long
def test_a_reply_that_was_cut_off_says_so_and_one_of_thoughts_alone_even_when_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask = ["generate", "demo", "--chat", "--prompt", "hi", "--max-tokens"]
    for words, said in (
        (["2", "--quiet"], "2 tokens went into the model's thoughts"),
        (["9"], "cut off after 9 tokens"),
    ):
        assert run(app, [*ask, *words]) == 0
        assert said in capsys.readouterr().err
    for words in (["9", "--quiet"], ["99", "--quiet"]):
        assert run(app, [*ask, *words]) == 0
        assert capsys.readouterr().err == ""


def test_a_full_disk_behind_stdout_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("swiftlet_mlx.cli.console.write", full)
    assert run(app, ["list", "--json"]) == 1
    assert capsys.readouterr().err == "swiftlet-mlx: the output cannot be written: No space left on device\n"


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
