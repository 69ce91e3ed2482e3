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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

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
from .tiles import sorted_rows, tile_height

TAIL_TOKENS = 256  # of the prompt's end decide which experts stay
TILE_PAIRS = 16384  # computed in one call: bounds the rows gathered for it
RUN_BYTES = 8 << 20  # one request at most: far above the 256 KiB from which SSDs are flat, small enough to spread
GROUP_EXPERTS = 16  # worth having in a group: each costs 2 to 3 ms of the host on CUDA (H200, 2026-12)
WINDOW = 3  # groups in the slots at once: one computing, one read, one being read
LAG = 1  # groups that may compute, or be copied, while the next is awaited
ALIVE = 3  # tiles whose intermediates are in memory at once
COPIED_EXPERTS = 32  # residents copied at once where they have to be copied


_Read = tuple[int, list[list[bytearray]] | None]  # bytes read, and the buffers of a staged fill


@dataclass(slots=True)
class _Group:
    """Experts that are read and computed together."""

    experts: list[int]
    runs: list[list[tuple[int, int]]] = field(default_factory=list)
    """(expert, slot) of what one request reads."""
    reads: list[Future[_Read]] = field(default_factory=list)
    readers: list[mx.array] = field(default_factory=list)
    """Once these have been evaluated nothing reads the group's slots any more."""


class ExpertPass:
    """The experts of one streamed layer, as layer_major.py wants them. To be closed, also after an error.

    Args:
        module: a switch layer that `moe.stream` has changed.
    """

    def __init__(self, module: Streamed) -> None:
        self._module = module
        self._pools: Pools = module.pools
        self._pool: SlotPool = module.pools.layers[module.layer]
        self._reading: deque[_Group] = deque()
        self._computing: deque[_Group] = deque()
        self._results: deque[mx.array] = deque()
        self._protected: set[int] = set()
        # On CUDA slots are memory of the host, which a matrix product would fetch again for every tile it computes
        # (H200: 16.8 s instead of 0.7 s for 7 layers and 4,096 tokens). On Metal host and device share it. A complete
        # pool is never written again: it has moved over.
        self._copy_first = backend() == "cuda" and not self._pool.complete

    @property
    def n_experts(self) -> int:
        return self._pool.table.expert_count

    def read_back(self, indices: mx.array) -> NDArray[np.uint32]:
        """Host synchronisation: the router's choice, and with it all that was built earlier and reads a slot."""
        if self._module.layer == self._pools.first:
            self._pools.before_step()
        return self._pools.read_back(indices)

    def in_groups(self, routes: Routes, x: mx.array) -> Iterator[tuple[Ints, mx.array]]:
        """Compute every pair of `routes` once. See `layer_major.Experts`."""
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
        here = deque(groups(residents, COPIED_EXPERTS if self._copy_first else max(1, len(residents))))
        while True:
            self._read_ahead(queue)
            if here:
                group = _Group(here.popleft())
            elif self._reading:
                group = self._next_read()
            else:
                break
            self._computing.append(group)
            yield from self._compute(group, routes, x)
            kept |= arrived.intersection(group.experts)
            while len(self._computing) > LAG or (self._computing and not (self._reading or here)):
                self._let_go(kept)
                self._read_ahead(queue)
        pool.policy.use([e for e in reversed(staying) if pool.slots[e] != EMPTY])

    def close(self) -> None:
        """End every read and every evaluation of this pass. The slot table tells the truth afterwards."""
        while self._reading:
            group = self._reading.popleft()
            self._settle(group)
        readers = [a for group in self._computing for a in group.readers]
        self._computing.clear()
        mx.eval(readers, *self._results)
        self._results.clear()

    def _compute(self, group: _Group, routes: Routes, x: mx.array) -> Iterator[tuple[Ints, mx.array]]:
        """The pairs of one group, tile by tile, lazily: whoever takes them starts the evaluation."""
        module, pool = self._module, self._pool
        slots = [int(pool.slots[e]) for e in group.experts]
        bank = range(len(slots)) if self._copy_first else slots
        weights = _weights(module)
        if self._copy_first:
            weights = _copies(weights, slots)
            group.readers += [a for *_, a in weights]
            mx.async_eval(group.readers)  # type: ignore[no-untyped-call]
        for tile in routes.tiles(group.experts, bank, TILE_PAIRS):
            height = tile_height(len(tile.rows), len(slots))
            with _using(weights):
                y = sorted_rows(_stock_call(module), module, x, tile.pairs // routes.k, tile.rows, height)
            if not self._copy_first:
                group.readers = [*group.readers, y][-ALIVE:]  # those before have been evaluated
            self._results.append(y)
            yield tile.pairs, y
            if len(self._results) == ALIVE:
                mx.eval(self._results.popleft())  # host sync

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
        arrived: list[int] = []
        for n, run in enumerate(group.runs):
            future = group.reads[n] if n < len(group.reads) else None  # broken off before it was asked for
            error = InterruptedError() if future is None else future.exception()
            if future is not None and error is None:
                read_bytes, staged = future.result()
                stats.reads += 1
                stats.read_bytes += read_bytes
                arrived += [slot for _, slot in run if staged is None]
            for i, (expert, slot) in enumerate(run):
                pool.settle(expert, slot, ok=error is None)
                if error is None and staged is not None:
                    pool.store_staged(slot, staged[i])
            failure = failure or error
        pool.filled(arrived)
        return failure

    def _let_go(self, kept: set[int]) -> None:
        """Wait for the group that has been computing longest; its slots may then be read into."""
        group = self._computing.popleft()
        mx.eval(group.readers)  # host sync
        self._protected -= set(group.experts) - kept


def _stock_call(module: Streamed) -> Callable[..., mx.array]:
    """`__call__` of the class that `moe.stream` has changed."""
    return cast("Callable[..., mx.array]", cast(Any, super(Streamed, module)).__call__.__func__)


_Weights = list[tuple[Any, str, mx.array]]  # a projection, the name of one of its arrays, and that array


def _weights(module: Streamed) -> _Weights:
    """The arrays over slots that the projections of a streamed layer use."""
    linears = [p.linear for p in vars(module).values() if isinstance(p, Projection)]
    return [(linear, part, a) for linear in linears for part, a in linear.items() if isinstance(a, mx.array)]


def _copies(weights: _Weights, slots: list[int]) -> _Weights:
    """The same, of these slots only, in memory of their own. Lazy."""
    index = mx.array(slots, mx.uint32)
    return [(linear, part, a[index]) for linear, part, a in weights]


@contextmanager
def _using(weights: _Weights) -> Iterator[None]:
    """Let projections use these arrays while a graph is built."""
    saved = [(linear, part, linear[part]) for linear, part, _ in weights]
    for linear, part, a in weights:
        linear[part] = a
    try:
        yield
    finally:
        for linear, part, a in saved:
            linear[part] = a
