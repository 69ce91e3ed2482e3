"""Real processes, killed without warning, repeated until done: the result is that of one undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_checkpoint import make_checkpoint, make_container
from loopback_hub import LoopbackHub, folder_files
from swiftlet_repack.install import Installation
from swiftlet_repack.sources import Hub

PROGRAM = """
import sys
from pathlib import Path
from swiftlet_repack.patience import Patience
from swiftlet_repack.install import Installation
from swiftlet_repack.sources import Hub
from swiftlet_repack.pace import Pace

pace = Pace(streams=3, span_bytes=50_000, record_bytes=8_192, record_seconds=0.05)
with Installation(Hub("Org/Model"), Path(sys.argv[1]), patience=Patience(first_wait=0.01), pace=pace) as work:
    work.look()
    print("begun", flush=True)
    work.carry_out()
print("done", flush=True)
"""


def start(hub: LoopbackHub, output: Path) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    env["HF_ENDPOINT"] = hub.endpoint
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(output)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(hub: LoopbackHub, output: Path) -> None:
    """The last run of a series, and the undisturbed one; they need no process of their own."""
    with Installation(Hub("Org/Model", endpoint=hub.endpoint), output) as work:
        work.look()
        work.carry_out()


def content(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kills"), [("checkpoint", 3), ("container", 1)])
def test_killed_again_and_again_it_still_gives_the_same_bytes(
    hub: LoopbackHub, tmp_path: Path, kind: str, kills: int
) -> None:
    rng = random.Random(kind)
    if kind == "checkpoint":
        source = make_checkpoint(tmp_path / "Model", layers=3, experts=8, vision=True, mtp=True, shards=3)
    else:
        source = make_container(tmp_path / "Model", layers=3, experts=8)
    hub.repo("Org/Model", folder_files(source))
    total = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
    finish(hub, tmp_path / "plain.qpack")
    hub.bytes_per_second = 150_000
    killed = 0
    for _ in range(kills):
        hub.forget()
        process = start(hub, tmp_path / "killed.qpack")
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        enough = rng.randrange(total // 8, total // 4)
        deadline = time.monotonic() + 10
        while hub.body_bytes() < enough and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert not (tmp_path / "killed.qpack").exists()
    assert killed == kills
    hub.bytes_per_second = 0
    time.sleep(0.1)  # let the hub notice that its clients are gone
    hub.forget()
    finish(hub, tmp_path / "killed.qpack")
    assert content(tmp_path / "killed.qpack") == content(tmp_path / "plain.qpack")
    assert hub.body_bytes() < total * (1 - 0.07 * kills)  # what was flushed before the kills did not travel again
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Model", "killed.qpack", "plain.qpack"]


def test_a_terminate_signal_flushes_what_arrived(hub: LoopbackHub, tmp_path: Path) -> None:
    source = make_container(tmp_path / "Model", layers=3, experts=8)
    hub.repo("Org/Model", folder_files(source))
    hub.bytes_per_second = 100_000
    process = start(hub, tmp_path / "out.qpack")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    while hub.body_bytes() < 60_000:
        time.sleep(0.005)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    assert process.returncode != 0
    assert "Cancelled: interrupted" in err
    hub.bytes_per_second = 0
    finish(hub, tmp_path / "out.qpack")
