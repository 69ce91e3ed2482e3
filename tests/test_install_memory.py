"""An installation's memory does not grow with the model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fake_checkpoint import make_checkpoint
from loopback_hub import LoopbackHub, folder_files


@pytest.mark.slow  # writes 2 GB: the checkpoint and the container
def test_a_gigabyte_is_installed_in_less_than_300_megabytes(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "Model", layers=8, experts=128, hidden=1024, inner=512, vocab=1024, shards=1)
    assert sum(f.stat().st_size for f in made.iterdir()) > 1_000_000_000
    with LoopbackHub() as hub:
        hub.repo("Org/Model", folder_files(made))
        env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
        words = ["-m", "swiftlet_repack", "--from-hf", "Org/Model", "--output", str(tmp_path / "out.qpack"), "--yes"]
        pid = os.spawnve(os.P_NOWAIT, sys.executable, [sys.executable, *words], {**env, "HF_ENDPOINT": hub.endpoint})
        _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    peak = usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024
    assert peak < 300_000_000
