"""One pass over the routed experts of a layer for a whole prompt: every expert is read at most once.

The experts of the prompt go through the layer's own slots, a group at a time: while one group computes, the
next is being read into slots that nothing needs any more. No memory beyond the pool is used, so the budget
of the pool is the budget of prefill. Residents are computed first, without a read. The rest are read in the
order they have on disk, neighbours in one request; the experts that the end of the prompt uses most come
last and stay, so that decoding starts warm.

Knows slots, reads and the order of things; the arithmetic is the stock layer's. Invariants: a slot is
claimed only after every result computed from it has been evaluated. However the pass ends (read error,
cancellation, Ctrl-C), no read is under way and no device work reads a slot when `close` returns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .device import backend
from .moe import Streamed
from .moe import _Projection as Projection
from .pools import Pools
from .reader import IO_THREADS
from .reads import neighbours
from .routes import Ints, Routes, groups
from .slots import EMPTY, SlotPool

TAIL_TOKENS = 256  # of the prompt's end decide which experts stay
TILE_PAIRS = 16384  # computed in one call: bounds the rows gathered for it
RUN_BYTES = 8 << 20  # one request at most: far above the 256 KiB from which SSDs are flat, small enough to spread
GROUP_EXPERTS = 16  # worth having in a group: each costs 2 to 3 ms of the host on CUDA (H200, 2026-12)
WINDOW = 3  # groups in the slots at once: one computing, one read, one being read


_Read = tuple[int, list[list[bytearray]] | None]  # bytes read, and the buffers of a staged fill


@dataclass(slots=True)
class _Group:
    """Experts that are read and computed together."""

    experts: list[int]
    runs: list[list[tuple[int, int]]] = field(default_factory=list)
    """(expert, slot) of what one request reads."""
    reads: list[Future[_Read]] = field(default_factory=list)
    results: list[mx.array] = field(default_factory=list)


@contextmanager
def _copied(module: Streamed, slots: mx.array) -> Iterator[None]:
    """Let a streamed layer's projections use a copy of these slots, in this order, while a graph is built."""
    linears = [p.linear for p in vars(module).values() if isinstance(p, Projection)]
    saved = [(linear, part, a) for linear in linears for part, a in linear.items() if isinstance(a, mx.array)]
    for linear, part, a in saved:
        linear[part] = a[slots]
    try:
        yield
    finally:
        for linear, part, a in saved:
            linear[part] = a


class ExpertPass:
    """The experts of one streamed layer, as prefill.py wants them. To be closed, also after an error.

    Args:
        module: a switch layer that `moe.stream` has changed.
    """

    def __init__(self, module: Streamed) -> None:
        self._module = module
        self._pools: Pools = module.pools
        self._pool: SlotPool = module.pools.layers[module.layer]
        self._reading: deque[_Group] = deque()
        self._computing: deque[_Group] = deque()
        self._protected: set[int] = set()
        # On CUDA slots are memory of the host, which a matrix product would fetch again for every row it computes
        # (H200: 16.8 s instead of 0.7 s for 7 layers and 4,096 tokens). On Metal host and device share it.
        self._copy_first = backend() == "cuda"

    @property
    def n_experts(self) -> int:
        return self._pool.table.expert_count

    def read_back(self, indices: mx.array) -> NDArray[np.uint32]:
        """Host synchronisation: the router's choice, and with it all that was built earlier and reads a slot."""
        if self._module.layer == self._pools.first:
            self._pools.before_step()
        return self._pools.read_back(indices)

    def in_groups(self, routes: Routes, x: mx.array) -> Iterator[tuple[Ints, mx.array]]:
        """Compute every pair of `routes` once. See `prefill.Experts`."""
        pool, stats = self._pool, self._pools.stats
        needed = routes.experts
        residents = [e for e in needed if pool.slots[e] != EMPTY]
        staying = routes.hottest(TAIL_TOKENS)[: pool.n_slots]
        missing = [e for e in needed if pool.slots[e] == EMPTY]
        # Slots to pass through: half of them, of a small pool three quarters, or groups become too small.
        through = min(-(-3 * pool.n_slots // 4), max(pool.n_slots // 2, WINDOW * GROUP_EXPERTS)) if missing else 0
        pinned = [e for e in staying if pool.slots[e] != EMPTY][: pool.n_slots - through]
        size = max(1, (pool.n_slots - len(pinned)) // WINDOW)
        arrived = set(staying).intersection(missing)  # read last, and kept from then on
        queue = deque(groups([e for e in missing if e not in arrived], size))
        queue += groups(sorted(arrived), size)
        stats.hits += len(residents)
        stats.misses += len(missing)

        kept = set(pinned)
        self._protected = set(residents)
        ready = _Group(residents)
        while True:
            self._read_ahead(queue)
            for tile in routes.tiles(ready.experts, [int(pool.slots[e]) for e in ready.experts], TILE_PAIRS):
                rows = x[mx.array((tile.pairs // routes.k).astype(np.uint32))]
                y = self._results(rows, tile.rows)
                ready.results.append(y)
                yield tile.pairs, y
                if len(ready.results) > 2:
                    mx.eval(ready.results.pop(0))  # host sync: at most two tiles of intermediates are alive
            self._computing.append(ready)
            kept |= arrived.intersection(ready.experts)
            while len(self._computing) > 1 or (self._computing and not self._reading):
                self._let_go(kept)
                self._read_ahead(queue)
            if not self._reading:
                break
            ready = self._next_read()
        pool.policy.use([e for e in reversed(staying) if pool.slots[e] != EMPTY])

    def close(self) -> None:
        """End every read and every evaluation of this pass. The slot table tells the truth afterwards."""
        while self._reading:
            group = self._reading.popleft()
            self._settle(group)
        results = [y for group in self._computing for y in group.results]
        self._computing.clear()
        mx.eval(results)

    def _results(self, rows: mx.array, slots: NDArray[np.uint32]) -> mx.array:
        """Lazy `[P, H]`: what the experts in these slots make of each row, by mlx-lm's own code."""
        if not self._copy_first or self._pool.complete:  # a complete pool is never written again: it has moved over
            return self._module._stock(rows, mx.array(slots)[:, None])[:, 0]
        held, local = np.unique(slots, return_inverse=True)
        with _copied(self._module, mx.array(held)):
            return self._module._stock(rows, mx.array(local.astype(np.uint32))[:, None])[:, 0]

    def _read_ahead(self, queue: deque[list[int]]) -> None:
        """Start the reads of as many groups as there are slots for."""
        while queue and len(queue[0]) <= self._pool.n_slots - len(self._protected):
            group = _Group(queue.popleft())
            before = len(self._pool.policy.residents)
            self._reading.append(group)  # first of all, so that `close` knows it
            claims = self._pool.claim(group.experts, self._protected)
            most = min(RUN_BYTES // self._pool.table.stride, -(-len(claims) // IO_THREADS))
            group.runs = neighbours(claims, max(1, most))
            for run in group.runs:
                group.reads.append(self._pools.submit(self._read, run))
            self._pools.stats.evictions += before - len(self._pool.policy.residents)
            self._protected.update(group.experts)

    def _read(self, run: list[tuple[int, int]]) -> _Read:
        """On an I/O thread: fill the slots of neighbours, or buffers if the device does not see host writes."""
        pool, first = self._pool, run[0][0]
        if pool.direct:
            return self._pools.source.read(pool.table.layer, first, [pool.rows(slot) for _, slot in run]), None
        staged = [[bytearray(s.size) for s in pool.table.sections] for _ in run]
        rows = [[memoryview(b) for b in buffers] for buffers in staged]
        return self._pools.source.read(pool.table.layer, first, rows), staged

    def _next_read(self) -> _Group:
        """Wait for the group whose reads were started first and enter it into the slot table."""
        start = time.perf_counter()
        wait(self._reading[0].reads)
        self._pools.stats.wait_seconds += time.perf_counter() - start
        group = self._reading.popleft()
        failure = self._settle(group)
        if failure is not None:
            raise failure
        return group

    def _settle(self, group: _Group) -> BaseException | None:
        """Enter what was read into the slot table; give the slots of a failed read back empty."""
        pool, stats, failure = self._pool, self._pools.stats, None
        for n, run in enumerate(group.runs):
            future = group.reads[n] if n < len(group.reads) else None  # broken off before it was asked for
            error = InterruptedError() if future is None else future.exception()
            if future is not None and error is None:
                read_bytes, staged = future.result()
                stats.reads += 1
                stats.read_bytes += read_bytes
            for i, (expert, slot) in enumerate(run):
                pool.settle(expert, slot, ok=error is None)
                if error is None and staged is not None:
                    pool.store_staged(slot, staged[i])
            failure = failure or error
        return failure

    def _let_go(self, kept: set[int]) -> None:
        """Wait for the group that has been computing longest; its slots may then be read into."""
        group = self._computing.popleft()
        mx.eval(group.results)  # host sync
        self._protected -= set(group.experts) - kept
