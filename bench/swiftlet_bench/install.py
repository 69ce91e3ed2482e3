"""Installing a checkpoint from a hub against plainly downloading the same bytes with huggingface_hub, on
loopback.

Both clients run as processes of their own against the same server process, in turn, several times; the ratio
is taken within a pair, so that a slow machine slows both. Knows processes and clocks; measures nothing inside
a client.

    python -m swiftlet_bench.install --gb 2 --runs 3

The loopback hub and the random checkpoint are those of the tests, so this runs from a checkout only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "tests"
DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
snapshot_download("Org/Model", local_dir=sys.argv[1], max_workers=4)
"""
INSTALL = """
import sys
from swiftlet_repack.cli import main
sys.argv = ["swiftlet-repack", "--from-hf", "Org/Model", "--output", sys.argv[1], "--quiet", "--yes"]
main()
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One client's run, start of its interpreter included."""

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int


def run(program: str, output: Path, endpoint: str) -> Run:
    """Run a client to its end; what it wrote is deleted.

    Args:
        program: Python source.
        output: Where it writes, its one argument.
        endpoint: Address of the hub.

    Raises:
        RuntimeError: if it failed.
    """
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program, str(output)], env=env)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    shutil.rmtree(output, ignore_errors=True)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"the client failed with status {os.waitstatus_to_exitcode(status)}")
    rss = usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024
    return Run(seconds, usage.ru_utime + usage.ru_stime, rss)


def measure(gb: float, runs: int, folder: Path) -> dict[str, Any]:
    """Time both clients on a random checkpoint of about `gb` GB; everything is written under `folder`."""
    layers = max(1, round(gb * 1e9 / 151e6))
    made = _tool("fake_checkpoint").make_checkpoint(
        folder / "hub" / "Org" / "Model", layers=layers, experts=128, hidden=1024, inner=512, vocab=1024,
        shards=max(1, round(gb)),
    )  # fmt: skip
    nbytes = sum(f.stat().st_size for f in made.iterdir())
    server = subprocess.Popen(
        [sys.executable, str(TESTS / "loopback_hub.py"), str(folder / "hub")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip().partition("=")[2]
        pairs = []
        for n in range(runs):
            clients = [("download", DOWNLOAD, folder / "plain"), ("install", INSTALL, folder / "out.qpack")]
            pair = {}
            for name, program, output in clients if n % 2 == 0 else reversed(clients):
                os.sync()
                pair[name] = run(program, output, endpoint)
            pairs.append(pair)
    finally:
        server.kill()
        server.wait()
    ratios = [pair["install"].seconds / pair["download"].seconds for pair in pairs]
    return {
        "bytes": nbytes,
        "runs": [{name: asdict(one) for name, one in pair.items()} for pair in pairs],
        "download_seconds": statistics.median(p["download"].seconds for p in pairs),
        "install_seconds": statistics.median(p["install"].seconds for p in pairs),
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "install_peak_rss_bytes": max(p["install"].peak_rss_bytes for p in pairs),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    if spec is None or spec.loader is None or not (TESTS / f"{name}.py").exists():
        raise SystemExit(f"{TESTS / name}.py is not there: this benchmark runs from a checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Parse options, measure, print one JSON object."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint")
    options.add_argument("--runs", type=int, default=3, help="pairs of runs")
    options.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print(json.dumps(measure(given.gb, given.runs, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
