"""Many experts at once: whole layers before the first token, and what will probably be needed while nobody waits.

Neighbours on disk are read in one request. Knows slots and read threads; nothing of steps. Invariant: after `fill` and
`Prefetch.end` every slot that was claimed here is entered in its table or free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait

from .read_threads import ReadThreads
from .reader import ExpertSource
from .reads import Run, neighbours
from .slots import EMPTY, SlotPool
from .stats import Stats

FILL_BYTES = 64 << 20  # one read of neighbouring experts when a layer is loaded whole
PREFETCH_BYTES = 8 << 20  # the same in the background: a prompt that arrives waits for one of them


def fill(pools: Sequence[SlotPool], source: ExpertSource, threads: ReadThreads, stats: Stats) -> None:
    """Load layers whose pools hold all their experts.

    Args:
        pools: of these layers, empty.
        source: of their experts.
        threads: that read.
        stats: where it is counted.

    Raises:
        ReadFailed: the first failure, after every read has ended.
    """
    runs = []
    for pool in pools:
        claims = pool.claim(range(pool.table.expert_count))
        runs += [Run(pool, run) for run in neighbours(claims, FILL_BYTES // pool.table.stride)]
    wait([threads.submit(run.read, source) for run in runs])
    for run in runs:
        if run.read_bytes:
            run.pool.filled([slot for _, slot in run.claims])
    _settle(runs, stats)
    for run in runs:
        if run.error is not None:
            raise run.error


class Prefetch:
    """Reads in the background, into free slots. The device must see host writes.

    Args:
        source: of the experts.
        threads: that read when nothing else is to be read.
        stats: where it is counted.
    """

    def __init__(self, source: ExpertSource, threads: ReadThreads, stats: Stats) -> None:
        self._source, self._threads, self._stats = source, threads, stats
        self._runs: list[Run] = []

    def claim(self, pools: Iterable[SlotPool], wanted: Mapping[int, Sequence[int]]) -> None:
        """Give free slots to those experts that have none.

        Args:
            pools: whose slots they are to have.
            wanted: layer to experts, most wanted first.
        """
        for pool in pools:
            experts = [e for e in wanted.get(pool.table.layer, ()) if pool.slots[e] == EMPTY]
            for run in neighbours(pool.claim(sorted(experts[: pool.n_free])), PREFETCH_BYTES // pool.table.stride):
                self._runs.append(Run(pool, run))

    def start(self) -> None:
        """Read what was claimed."""
        for run in self._runs:
            self._threads.post_idle(run.read, self._source)

    def end(self) -> None:
        """Drop what has not begun; enter what was read. Must come before anything else claims slots."""
        if not self._runs:
            return
        self._threads.drop_idle()
        self._threads.drain()
        _settle(self._runs, self._stats)
        self._runs.clear()


def _settle(runs: Iterable[Run], stats: Stats) -> None:
    for run in runs:
        stats.reads += run.read_bytes > 0
        stats.read_bytes += run.read_bytes
        for expert, slot in run.claims:
            run.pool.settle(expert, slot, ok=run.read_bytes > 0)
