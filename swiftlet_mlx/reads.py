"""Reads under way: who reads which experts into which slots, and what came of it.

Runs on read threads and touches bytes only; the slot table is changed by pools.py, on the thread that owns the model.
Invariant: every claim of a `Reads` that was posted ends in one result, whatever the disk does.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from .reader import ExpertSource
from .slots import SlotPool


class Reads:
    """The reads of one layer call."""

    __slots__ = ("begun", "claims", "done", "own", "pool", "results")

    def __init__(self, pool: SlotPool, claims: list[tuple[int, int]]) -> None:
        self.pool = pool
        self.claims = claims  # (expert, slot)
        self.own: list[tuple[int, int]] = []  # of the claims: those that whoever waits for them is to read
        self.results: list[tuple[int, int, int, list[bytearray] | None, BaseException | None]] = []
        self.begun: SimpleQueue[None] = SimpleQueue()
        self.done: SimpleQueue[None] = SimpleQueue()

    def read(self, source: ExpertSource, expert: int, slot: int) -> None:
        """Fill a slot, or a staging buffer where the device does not see host writes. On any thread."""
        pool, n, staging, error = self.pool, 0, None, None
        self.begun.put(None)
        try:
            if pool.direct:
                n = source.read(pool.table.layer, expert, [pool.rows(slot)])
            else:
                staging = [bytearray(s.size) for s in pool.table.sections]
                n = source.read(pool.table.layer, expert, [[memoryview(b) for b in staging]])
        except Exception as raised:
            error = raised
        self.results.append((expert, slot, n, staging, error))
        self.done.put(None)


class Run:
    """Neighbouring experts of one layer, read in one request."""

    def __init__(self, pool: SlotPool, claims: list[tuple[int, int]]) -> None:
        self.pool = pool
        self.claims = claims  # (expert, slot), ascending by expert
        self.read_bytes = 0  # 0 until they are read
        self.error: Exception | None = None

    def read(self, source: ExpertSource) -> None:
        """On a read thread; the device must see host writes."""
        try:
            rows = [self.pool.rows(slot) for _, slot in self.claims]
            self.read_bytes = source.read(self.pool.table.layer, self.claims[0][0], rows)
        except Exception as error:
            self.error = error


def neighbours(claims: Sequence[tuple[int, int]], most: int) -> list[list[tuple[int, int]]]:
    """Cut (expert, slot) pairs, ascending by expert, into runs that lie side by side on disk, `most` a run."""
    runs: list[list[tuple[int, int]]] = []
    for expert, slot in claims:
        if runs and expert == runs[-1][-1][0] + 1 and len(runs[-1]) < most:
            runs[-1].append((expert, slot))
        else:
            runs.append([(expert, slot)])
    return runs
