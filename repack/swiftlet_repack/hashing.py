"""Hashes of files: of finished ones, two at a time, and running ones of a file whose bytes come in order.

Knows files and bytes; not what they are for.

Invariant: memory stays at a few blocks whatever the files' sizes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 2  # one hash runs at 1 to 2 GB/s: two keep up with an SSD without taking the machine
BLOCK_BYTES = 1 << 20  # stays in a core's cache between the read and the hash


def hash_files(
    folder: Path, names: Iterable[str], on_bytes: Callable[[int], None] | None = None, *, threads: int = THREADS
) -> dict[str, str]:
    """sha256 in hex of files under a folder, by relative path, in the order given.

    Args:
        folder: where they lie.
        names: relative paths.
        on_bytes: told the bytes hashed so far, from any of the threads.
        threads: files hashed at once.

    Raises:
        OSError: if a file cannot be read.
    """
    lock, done = threading.Lock(), 0

    def one(name: str) -> str:
        nonlocal done
        digest, buffer = hashlib.sha256(), bytearray(BLOCK_BYTES)
        view = memoryview(buffer)
        with open(folder / name, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
                with lock:
                    done += count
                    if on_bytes is not None:
                        on_bytes(done)
        return digest.hexdigest()

    names = list(names)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


class FileHashes:
    """The running hashes of one file: sha256 always, git's object id where that is what the source
    announces."""

    def __init__(self, size: int, *, sha256: str | None = None, git_oid: str | None = None) -> None:
        self._size, self._expected, self._git_oid = size, sha256, git_oid
        self.sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if git_oid else None

    def copy(self) -> FileHashes:
        twin = FileHashes(self._size, sha256=self._expected, git_oid=self._git_oid)
        twin.sha256, twin._git = self.sha256.copy(), self._git and self._git.copy()
        return twin

    def update(self, block: bytes | memoryview) -> None:
        self.sha256.update(block)
        if self._git is not None:
            self._git.update(block)

    def sink(self, at: int, block: bytes) -> None:
        """`update`, in the shape of a fetcher's sink."""
        self.update(block)

    def fit(self) -> bool:
        """Whether what was fed in has the hashes that were announced; True if none was."""
        if self._expected is not None and self.sha256.hexdigest() != self._expected:
            return False
        return self._git is None or self._git.hexdigest() == self._git_oid
