"""`swiftlet-repack` as a process: results, one plain message for what fails, exit codes, quiet in a pipe."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_checkpoint import make_checkpoint

from swiftlet_mlx.qpack import open_container

PROGRAM = [sys.executable, "-m", "swiftlet_repack"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "Model")


def repack(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *args], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("quiet", [False, True])
def test_a_pipe_gets_words_and_no_progress_bar(source: Path, tmp_path: Path, quiet: bool) -> None:
    done = repack("--source", source, "--output", tmp_path / "out.qpack", *(["--quiet"] if quiet else []))
    assert done.returncode == 0
    assert done.stdout == ""
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    assert ("swiftlet-mlx chat" in done.stderr) != quiet
    assert open_container(tmp_path / "out.qpack").version == 1


def test_a_terminal_gets_a_progress_bar(source: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "--source", source, "--output", tmp_path / "out.qpack"], stderr=theirs, stdout=theirs, env={
            **os.environ, "TERM": "xterm", "COLUMNS": "100"
        },
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other side has closed: how Linux ends a terminal
            break
        if b"is complete" in shown.replace(b"\r\n", b" ") and process.poll() is not None:
            break
    assert process.wait() == 0
    os.close(ours)
    assert b"\x1b[" in shown
    assert "━".encode() in shown


@pytest.mark.long
def test_what_fails_is_one_message_without_a_traceback(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    out = str(tmp_path / "out.qpack")
    for args, code, words in (
        (["--source", str(tmp_path / "empty"), "--output", out], 1, "config.json"),
        (["--source", str(source), "--output", str(tmp_path / "taken")], 1, "not a container"),
        (["--source", str(source)], 2, "--output is missing"),
        (["--output", out], 2, "--from-hf"),
        (["--source", str(source), "--from-hf", "a/b", "--output", out], 2, "one source"),
        (["--sauce", "x"], 2, "--sauce"),
    ):
        done = repack(*args)
        assert done.returncode == code, (args, done.stderr)
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert not (tmp_path / "out.qpack").exists()


def test_an_interruption_ends_with_130_and_the_same_command_continues(tmp_path: Path) -> None:
    source, output = (
        make_checkpoint(tmp_path / "Model", layers=40, experts=32, hidden=256, inner=128),
        tmp_path / "o.qpack",
    )
    process = subprocess.Popen([*PROGRAM, "--source", source, "--output", output], stderr=subprocess.PIPE, text=True)
    first = tmp_path / "o.qpack.partial/packed_experts/layer_00.bin"
    while not first.exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == "swiftlet-mlx: interrupted; repeat the same command to continue\n"
    assert not output.exists()
    assert repack("--source", source, "--output", output).returncode == 0
    assert open_container(output).layer_count == 40
