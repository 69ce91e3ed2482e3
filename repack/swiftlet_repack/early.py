"""Hashes of a container's files, taken while others are still being fetched.

Knows the journal, which says what is in place, and a pool of threads; fetches nothing. Invariant: a hash it
gives is that of the file's last bytes: what was mended after it was hashed is hashed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from swiftlet_mlx.errors import Cancelled

from .delivery import Delivery, Repair
from .disk import in_words
from .hashing import hash_files
from .journal import Journal
from .transfer import Progress


class EarlyHashes:
    """sha256 of each file of the container, taken in the background as soon as all its bytes are in place."""

    def __init__(
        self,
        deliveries: Sequence[Delivery],
        sizes: Mapping[str, int],
        folder: Path,
        journal: Journal,
        pool: ThreadPoolExecutor,
        cancel: threading.Event,
    ) -> None:
        self._deliveries, self._sizes, self._folder = deliveries, sizes, folder
        self._journal, self._pool, self._cancel = journal, pool, cancel
        self._hashes: dict[str, Future[str]] = {}
        self._bytes: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[str, int, int]]] = {name: [] for name in sizes}
        for delivery in deliveries:
            for segment in delivery.route.segments:
                if segment.target in self._waiting:
                    self._waiting[segment.target].append((delivery.file.name, segment.start, segment.stop))

    def look(self) -> None:
        """Begin what can be hashed now."""
        for name, parts in list(self._waiting.items()):
            while parts and self._journal.covered_to(parts[-1][0], parts[-1][1]) >= parts[-1][2]:
                parts.pop()
            if not parts:
                del self._waiting[name]
                self._begin(name)

    def result(self, repairs: Iterable[Repair], report: Callable[[Progress], None]) -> dict[str, str]:
        """All hashes, by name, once they are there. What was mended after it was hashed is hashed again."""
        self.look()
        routes = {d.file.name: d.route for d in self._deliveries}
        for name in {p.target for r in repairs for p in routes[r.file].pieces(r.start, r.stop)} & set(self._sizes):
            wait([self._hashes[name]])
            self._begin(name)
        moment = Progress(sum(self._sizes.values()), phase="hashing")
        while wait(self._hashes.values(), 0.1).not_done:
            report(replace(moment, done_bytes=sum(self._bytes.values())))
        return {name: self._hashes[name].result() for name in self._sizes}

    def _begin(self, name: str) -> None:
        self._hashes[name] = self._pool.submit(self._hash, name)

    def _hash(self, name: str) -> str:
        def count(done: int) -> None:
            self._bytes[name] = done
            if self._cancel.is_set():
                raise Cancelled("stopped; repeat the same command to continue")

        with in_words(self._folder / name):
            return hash_files(self._folder, [name], count, threads=1)[name]
