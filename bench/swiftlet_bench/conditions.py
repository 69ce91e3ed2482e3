"""What may have spoiled a run: the machine swapped, was too warm, or worked for others meanwhile.

Knows counters of the whole machine; no models. Linux: /proc and /sys. macOS: `vm_stat`, `notifyutil` and `pmset`, which
need no root; they have not been run by this project, their texts are parsed in tests. Invariant: what cannot be known
is absent, not zero, and a run that began with a quantity ends with it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import process
from .machine import said

THERMAL_PRESSURE = "com.apple.system.thermalpressurelevel"  # 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping


@dataclass(frozen=True, slots=True)
class Moment:
    """Counters of the machine: bytes written to swap, times or degree of throttling, seconds all its CPUs were busy."""

    swapped_bytes: int | None
    throttled: int | None
    busy_seconds: float | None


class Watch:
    """Begun before a run, asked after it."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._own = process.cpu_seconds()
        self._before = now()

    def values(self) -> dict[str, float]:
        """`swap_written_bytes` by the machine, `throttled` (1 if it was), `others_cpu_share` of all CPUs; as known."""
        before, after = self._before, now()
        found: dict[str, float] = {}
        if before.swapped_bytes is not None:
            found["swap_written_bytes"] = (after.swapped_bytes or before.swapped_bytes) - before.swapped_bytes
        if before.throttled is not None:
            # Linux counts events, so a difference tells; macOS says how it is now
            still = sys.platform == "darwin" and max(before.throttled, after.throttled or 0) > 0
            found["throttled"] = float(still or (after.throttled or 0) > before.throttled)
        if before.busy_seconds is not None:
            others = (after.busy_seconds or 0.0) - before.busy_seconds - (process.cpu_seconds() - self._own)
            span = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
            found["others_cpu_share"] = min(1.0, max(0.0, others / span))
        return found


def now() -> Moment:
    """The machine's counters."""
    if sys.platform == "darwin":  # not run here
        heat = said("notifyutil", "-g", THERMAL_PRESSURE), said("pmset", "-g", "therm")
        return Moment(mac_swapped_bytes(said("vm_stat")), mac_throttled(*heat), None)
    return Moment(swapped_bytes(), _throttle_events(), _busy_seconds())


def flags(values: Mapping[str, tuple[float, ...]]) -> list[str]:
    """What a reader must know about the runs with these values, quantity by quantity."""
    found = []
    swapped, throttled = max(values.get("swap_written_bytes", (0.0,))), values.get("throttled", ())
    others = max(values.get("others_cpu_share", (0.0,)))
    if swapped:
        found.append(f"swapping: up to {swapped / 1e6:.1f} MB written in a run")
    if any(throttled):
        found.append(f"throttled by heat: {sum(map(bool, throttled))} of {len(throttled)} runs")
    if others > OTHERS_SHARE:
        found.append(f"shared: other programs had up to {others:.0%} of the CPUs")
    return found


OTHERS_SHARE = 0.1  # a quiet machine's own housekeeping stays far below


def swapped_bytes(root: Path = Path("/")) -> int | None:
    """Bytes Linux has written to swap since it was started."""
    found = re.search(r"^pswpout (\d+)$", _text(root / "proc/vmstat"), re.MULTILINE)
    return int(found[1]) * os.sysconf("SC_PAGE_SIZE") if found else None


def mac_swapped_bytes(vm_stat: str) -> int | None:
    """The same of macOS, from what `vm_stat` prints."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = re.search(r"^Swapouts:\s+(\d+)\.", vm_stat, re.MULTILINE)
    return int(pages[1]) * int(page[1]) if page and pages else None


def mac_throttled(notifyutil: str, pmset: str) -> int | None:
    """Whether heat slows a Mac down now: 0 if not, the degree if so, from what two programs print."""
    level = re.search(rf"^{re.escape(THERMAL_PRESSURE)}\s+(\d+)$", notifyutil, re.MULTILINE)
    limits = [int(n) for n in re.findall(r"CPU_(?:Speed|Scheduler)_Limit\s*=\s*(\d+)", pmset)]
    if level is None and not limits and "warning level" not in pmset.lower():
        return None
    warnings = [int(n) for n in re.findall(r"Warning Level\s*=\s*(\d+)", pmset, re.IGNORECASE)]
    return max([int(level[1]) if level else 0, *warnings, *(int(n < 100) for n in limits)])


def _throttle_events(root: Path = Path("/")) -> int | None:
    """How often Linux has slowed a CPU down for heat; None where no CPU says (most virtual machines)."""
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    counts = [int(text) for text in map(_text, files) if text.strip().isdigit()]
    return sum(counts) if counts else None


def _busy_seconds(root: Path = Path("/")) -> float | None:
    """Seconds that all CPUs together have worked, or were taken away by the machine below."""
    words = _text(root / "proc/stat").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    user, nice, system, _idle, _wait, hard, soft, stolen = (int(n) for n in words[1:9])
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
