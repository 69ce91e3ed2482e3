"""Memory and processor time of this process, as the system counts them.

Linux: resident set size, whose peak can be reset. macOS: physical footprint, the number Activity Monitor shows and the
system kills by; it counts memory shared with the GPU, compressed pages too, and no file pages. The macOS parts follow
<sys/resource.h> and have not been run by this project. Invariant: numbers are bytes; what cannot be known is None.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

_RUSAGE_INFO_V4 = 4
_FOOTPRINT, _LIFETIME_MAX_FOOTPRINT = 72, 240  # byte offsets in struct rusage_info_v4
_RUSAGE_INFO_V4_BYTES = 296


def reset_peak() -> bool:
    """Let the peak begin anew. False where the system cannot (macOS: measure in a process of its own)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The most memory this process has had since its start or the last reset."""
    return _memory("VmHWM", _LIFETIME_MAX_FOOTPRINT)


def now_bytes() -> int:
    """What this process has now."""
    return _memory("VmRSS", _FOOTPRINT)


def cpu_seconds() -> float:
    """Processor time this process has used, all threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory(linux: str, macos: int) -> int:
    if sys.platform == "linux":
        return _status(linux)
    footprint = _rusage_info(macos)
    return footprint if footprint is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _rusage_info(offset: int) -> int | None:
    """A field of proc_pid_rusage's answer (macOS; not run here)."""
    try:
        call = ctypes.CDLL("/usr/lib/libproc.dylib", use_errno=True).proc_pid_rusage
    except (OSError, AttributeError):
        return None
    buffer = ctypes.create_string_buffer(_RUSAGE_INFO_V4_BYTES)
    if call(os.getpid(), _RUSAGE_INFO_V4, ctypes.byref(buffer)):
        return None
    return int.from_bytes(buffer.raw[offset : offset + 8], "little")
