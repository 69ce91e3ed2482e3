"""The system's file cache: how much of a model is in it, and how to empty it for one model.

A run from the page cache measures memory, a run without it the disk; they are different experiments. Knows files, no
models. Invariant: `evict` touches only the files it is given, and changes no byte of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from swiftlet_mlx.errors import SwiftletError

PURGE_HINT = (
    "macOS has no way to empty the cache of single files; `sudo purge` empties all of it. "
    "Or read something larger than the memory first"
)


class CannotEvict(SwiftletError):
    """The system offers no way to empty its file cache for a file."""


def evict(folder: Path) -> None:
    """Make the system forget a model's file pages (Linux).

    Raises:
        CannotEvict: on a system without posix_fadvise, or if pages stay (files on tmpfs are memory).
    """
    if not hasattr(os, "posix_fadvise"):
        raise CannotEvict(f"a cold run cannot be arranged here: {PURGE_HINT}")
    for path in files(folder):
        forget(path)
    left = cached_share(folder)
    if left is not None and left > 0.05:
        raise CannotEvict(
            f"{folder.name}: {left:.0%} of its files stay in memory (a memory file system, or another program has "
            "them mapped); put the model on a disk for a cold run"
        )


def forget(path: Path) -> None:
    """Ask Linux to drop a file's pages; elsewhere there is no way."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(folder: Path) -> float | None:
    """Share of a model's bytes that are in the page cache, None where the system does not tell."""
    cached = total = 0
    for path in files(folder):
        size = path.stat().st_size
        pages = _resident_pages(path, size)
        if pages is None:
            return None
        cached += min(size, pages * mmap.PAGESIZE)
        total += size
    return cached / total if total else None


def state(share: float | None) -> str:
    """A word for it: `cold`, `warm`, `part`, `unknown`."""
    if share is None:
        return "unknown"
    return "cold" if share < 0.05 else "warm" if share > 0.95 else "part"


def files(folder: Path) -> Iterator[Path]:
    """The files that hold weights."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".bin", ".safetensors") and path.stat().st_size:
            yield path


def _resident_pages(path: Path, size: int) -> int | None:
    """Pages of a file that are in memory. The mapping is never touched, so nothing is read."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    except (OSError, AttributeError):
        return None
    fd = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if libc.mincore(address, size, flags):
            return None
        return sum(flag & 1 for flag in flags.raw)
    finally:
        libc.munmap(address, size)
