"""How a command ends: by Ctrl-C, by a reader that leaves. Real processes, the bundled model."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# so hot that no end comes soon
ENDLESS = [sys.executable, "-m", "swiftlet_mlx", "generate", "demo", "--prompt", "x", "--temp", "3", "--seed", "1"]


def start(*more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*ENDLESS, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
