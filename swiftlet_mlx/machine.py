"""What the operating system says about its memory: how much this process may take, and whether others suffer.

Knows /proc, control groups and sysctl; knows nothing of models and MLX. Invariant: page cache is counted as free
once at most, and a number that cannot be read limits nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

UNLIMITED = 1 << 62
# Shares of the last ten seconds in which some (all) tasks waited for memory, in per cent, from which Linux is under
# pressure. A machine that streams experts through its page cache shows 1 to 3 while it is well (2026-12).
PSI_WARNING, PSI_CRITICAL = 10.0, 5.0


class Pressure(IntEnum):
    """As macOS grades it."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def available_bytes(root: Path = Path("/")) -> int:
    """Memory this process may still take without driving anything out.

    Linux: MemAvailable, or what the limit of a control group leaves, whichever is less. A group's file pages are not
    counted as taken, for they are given back on demand. macOS: the share of memory that the system calls free.

    Args:
        root: where /proc and /sys are.
    """
    if sys.platform == "darwin":  # not run here
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free_percent = sysctl("kern.memorystatus_level")
        return physical * (free_percent if free_percent is not None else 75) // 100
    return min(_meminfo(root / "proc/meminfo"), *_group_limits(root), UNLIMITED)


def pressure(root: Path = Path("/")) -> Pressure:
    """Whether memory is short now; NORMAL where the system does not say."""
    if sys.platform == "darwin":
        level = sysctl("kern.memorystatus_vm_pressure_level")
        return Pressure(level) if level in tuple(Pressure) else Pressure.NORMAL
    grades = [_psi(folder / "memory.pressure") for folder in _groups(root)] + [_psi(root / "proc/pressure/memory")]
    return max(grades)


def sysctl(name: str) -> int | None:
    """An integer of macOS's sysctl, None where there is none."""
    try:
        call = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    value, length = ctypes.c_uint64(0), ctypes.c_size_t(8)
    done = call(name.encode(), ctypes.byref(value), ctypes.byref(length), None, ctypes.c_size_t(0))
    return None if done != 0 else value.value & (1 << 8 * length.value) - 1


def _meminfo(path: Path) -> int:
    try:
        fields = dict(line.split(":") for line in path.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return UNLIMITED


def _groups(root: Path) -> Iterator[Path]:
    """Folders of this process's control group (version 2) and of those above it."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    inner = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folder = top / inner
    while folder != top and top in folder.parents:
        yield folder
        folder = folder.parent
    yield top


def _group_limits(root: Path) -> Iterator[int]:
    """What each control group's limit leaves, page cache not counted as taken."""
    for folder in _groups(root):
        try:
            limit = int((folder / "memory.max").read_text())  # "max" is no number: no limit
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken = sum(int(stat.get(key, 0)) for key in ("anon", "shmem", "kernel"))
        except (OSError, ValueError):
            continue
        yield max(0, limit - taken)
    old = root / "sys/fs/cgroup/memory"  # version 1
    try:
        limit = int((old / "memory.limit_in_bytes").read_text())
        stat = dict(line.split() for line in (old / "memory.stat").read_text().splitlines())
        yield max(0, limit - int(stat["total_rss"]))
    except (OSError, ValueError, KeyError):
        pass


def _psi(path: Path) -> Pressure:
    try:
        waits = {
            line.split()[0]: float(line.split()[1].removeprefix("avg10=")) for line in path.read_text().splitlines()
        }
    except (OSError, ValueError, IndexError):
        return Pressure.NORMAL
    if waits.get("full", 0.0) >= PSI_CRITICAL:
        return Pressure.CRITICAL
    return Pressure.WARNING if waits.get("some", 0.0) >= PSI_WARNING else Pressure.NORMAL


def return_freed_memory() -> None:
    """Give the pages of freed arrays back to the system.

    glibc raises its own threshold when large blocks are freed, and from then on keeps blocks below it. macOS gives them
    back by itself.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such function
        if trim is not None:
            trim(0)
