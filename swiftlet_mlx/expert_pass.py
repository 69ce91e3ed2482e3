"""One pass over the routed experts of a layer for a whole prompt: every expert is read at most once.

The experts of the prompt go through the layer's own slots, a group at a time: while one group computes, the next is
being read. Residents are computed first, without a read. The rest are read in the order they have on disk, neighbours
in one request; the experts that the end of the prompt uses most come last and stay, so that decoding starts warm.

Where host and device share memory, the next group is read into slots that nothing needs any more, half of them at a
time: no memory beyond the pool is used, so the budget of the pool is the budget of prefill. On CUDA it is read into one
half of the staging rows and moved into the slots, all that are free, behind the products of the group before.

Knows slots, reads and the order of things; the arithmetic is the stock layer's. Invariants: what a read writes to is
claimed only after everything that reads it has been evaluated. However the pass ends (read error, cancellation,
Ctrl-C), no read is under way and no device work reads a slot when `close` returns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .moe import Streamed
from .pools import Pools
from .reader import IO_THREADS
from .reads import neighbours
from .results import as_index
from .routes import Layout, Routes, groups
from .slots import EMPTY, SlotPool
from .tiles import rows_in_tiles, tile_height

TAIL_TOKENS = 256  # of the prompt's end decide which experts stay
CALL_ROWS = 16384  # computed in one call: bounds the rows gathered for it
RUN_BYTES = 8 << 20  # one request at most: far above the 256 KiB from which SSDs are flat, small enough to spread
GROUP_EXPERTS = 32  # worth having in a group: each costs 1 to 2 ms of the host on CUDA (H200, 2026-12)
ALIVE = 3  # calls whose intermediates are in memory at once

_Read = tuple[int, list[list[bytearray]] | None]  # bytes read, and the buffers of a fill that MLX must do


@dataclass(slots=True)
class _Group:
    """Experts that are read and computed together."""

    experts: list[int]
    runs: list[list[tuple[int, int]]] = field(default_factory=list)
    """(expert, slot or staging row) of what one request reads."""
    reads: list[Future[_Read]] = field(default_factory=list)


class ExpertPass:
    """The experts of one streamed layer, as layer_major.py wants them. To be closed, also after an error.

    Args:
        module: a switch layer that `moe.stream` has changed.
    """

    def __init__(self, module: Streamed) -> None:
        self._module = module
        self._pools: Pools = module.pools
        self._pool: SlotPool = module.pools.layers[module.layer]
        self._staging = self._pool.staging
        self._layout: Layout | None = None
        self._residents: list[int] = []
        self._tail: list[int] = []  # what the end of the prompt uses, most used first
        self._queue: deque[list[int]] = deque()
        self._reading: deque[_Group] = deque()
        self._results: deque[mx.array] = deque()
        self._protected: set[int] = set()  # whose slots must not be given away now
        self._kept: set[int] = set()  # nor later in this pass, once they have been computed
        self._half_rows = 0  # of the staging rows: groups are read into one half and the other in turn
        self._moves: list[mx.array] = []  # of each group out of there

    @property
    def n_experts(self) -> int:
        return self._pool.table.expert_count

    def read_back(self, indices: mx.array) -> NDArray[np.uint32]:
        """Host synchronisation: the router's choice, and with it all that was built earlier and reads a slot."""
        if self._module.layer == self._pools.first:
            self._pools.before_step()
        return self._pools.read_back(indices)

    def arrange(self, routes: Routes) -> Layout:
        """Decide in which order the experts are computed, and begin to read. See `layer_major.Experts`."""
        pool, stats = self._pool, self._pools.stats
        needed = routes.experts
        self._residents = [e for e in needed if pool.slots[e] != EMPTY]
        missing = [e for e in needed if pool.slots[e] == EMPTY]
        stats.hits += len(self._residents)
        stats.misses += len(missing)
        self._tail = routes.hottest(TAIL_TOKENS)[: pool.n_slots]
        # Slots to pass through: half of them, of a small pool three quarters, or groups become too small.
        through = min(-(-3 * pool.n_slots // 4), max(pool.n_slots // 2, GROUP_EXPERTS)) if missing else 0
        pinned = [e for e in self._tail if pool.slots[e] != EMPTY][: pool.n_slots - through]
        arrived = set(self._tail).intersection(missing)  # read last, and kept from then on
        self._protected, self._kept = set(self._residents), arrived.union(pinned)

        size = self._group_size(pool.n_slots - len(pinned)) if missing else 1
        self._queue.extend(groups([e for e in missing if e not in arrived], size))
        self._queue.extend(groups(sorted(arrived), size))
        order = [*self._residents, *chain.from_iterable(self._queue)]
        self._pools.in_doubt = True
        self._read_ahead()
        self._layout = routes.lay_out(order, tile_height(routes.n_pairs, len(order)))
        return self._layout

    def compute(self, x: mx.array) -> Iterator[mx.array]:
        """Compute every row of the layout once, in order. See `layer_major.Experts`."""
        layout = self._layout
        if layout is None:
            raise RuntimeError("`arrange` comes before `compute`")
        k = layout.places.size // x.shape[0]
        tokens, tiles = as_index(layout.pairs // k), as_index(layout.tiles)
        experts, n = self._residents, 0
        while True:
            if experts:
                yield from self._products(layout, n, len(experts), x, tokens, tiles)
                self._let_go(experts)
                n += len(experts)
            self._read_ahead()
            if not self._reading:
                break
            experts = self._next_read()
        self._pool.policy.use([e for e in reversed(self._tail) if self._pool.slots[e] != EMPTY])
        if self._staging is not None:  # whoever writes to these rows or slots next is behind it in the stream
            self._results.clear()
            self._moves.clear()
        self._pools.in_doubt = False

    def close(self) -> None:
        """End every read and every evaluation of this pass. The slot table tells the truth afterwards."""
        while self._reading:
            self._settle(self._reading.popleft())
        mx.eval(*self._results, *self._moves)
        self._results.clear()

    # ---- products

    def _products(
        self, layout: Layout, first: int, count: int, x: mx.array, tokens: mx.array, tiles: mx.array
    ) -> Iterator[mx.array]:
        """The rows of the `count` residents that come in the layout from `first` on, lazily: whoever takes them
        starts the evaluation."""
        height = layout.height
        slots = self._pool.lookup_few(layout.experts[first : first + count], (count,))
        start, stop = int(layout.starts[first]), int(layout.starts[first + count])
        for a in range(start, stop, CALL_ROWS):
            b = min(a + CALL_ROWS, stop)
            own = slots[tiles[a // height : b // height] - first]
            y = rows_in_tiles(_stock_call(self._module), self._module, x[tokens[a:b]], own, height)
            self._results.append(y)
            yield y
            if len(self._results) == ALIVE:
                mx.eval(self._results.popleft())  # host sync

    def _let_go(self, experts: list[int]) -> None:
        """The slots of experts that have been computed may be given away, but for those that are kept."""
        if self._staging is None and (self._queue or self._reading):
            mx.eval(*self._results)  # host sync
            self._results.clear()
        self._protected.difference_update(experts)
        self._protected.update(self._kept.intersection(experts))

    # ---- reads

    def _group_size(self, free: int) -> int:
        """Experts to a group, there being so many slots to pass through."""
        if self._staging is None:
            return max(1, free // 2)
        size = self._half_rows = min(free, max(self._pool.n_slots // 2, GROUP_EXPERTS))
        self._staging.reserve(self._pool.table.payload_bytes, 2 * size)
        return size

    def _read_ahead(self) -> None:
        """Start the reads of as many groups as there is room for."""
        pool = self._pool
        while self._queue and self._has_room(len(self._queue[0])):
            half = (len(self._moves) + len(self._reading)) % 2
            group = _Group(self._queue.popleft())
            self._reading.append(group)  # first of all, so that `close` knows it
            if self._staging is None:
                where = self._claim(group.experts)
                self._protected.update(group.experts)
            else:
                where = [(e, half * self._half_rows + i) for i, e in enumerate(group.experts)]
            most = min(RUN_BYTES // pool.table.stride, -(-len(where) // IO_THREADS))
            group.runs = neighbours(where, max(1, most))
            for run in group.runs:
                group.reads.append(self._pools.submit(self._read, run))

    def _has_room(self, count: int) -> bool:
        """Whether so many experts may be read: there are slots for them, or half of the staging rows is free."""
        if self._staging is None:
            return count <= self._pool.n_slots - len(self._protected)
        if len(self._reading) == 2:
            return False
        started = len(self._moves) + len(self._reading)
        if started >= 2:
            mx.eval(self._moves[started - 2])  # host sync
        return True

    def _claim(self, experts: list[int]) -> list[tuple[int, int]]:
        pool = self._pool
        before = len(pool.policy.residents)
        claims = pool.claim(experts, self._protected)
        self._pools.stats.evictions += before - len(pool.policy.residents)
        return claims

    def _read(self, run: list[tuple[int, int]]) -> _Read:
        """On an I/O thread: fill rows for neighbours, or buffers if the device does not see host writes."""
        pool, first = self._pool, run[0][0]
        if pool.direct:
            return self._pools.source.read(pool.table.layer, first, [pool.rows(row) for _, row in run]), None
        buffers = [[bytearray(s.size) for s in pool.table.sections] for _ in run]
        rows = [[memoryview(b) for b in sections] for sections in buffers]
        return self._pools.source.read(pool.table.layer, first, rows), buffers

    def _next_read(self) -> list[int]:
        """Wait for the group whose reads were started first and make it resident."""
        start = time.perf_counter()
        for read in self._reading[0].reads:
            read.exception()  # host sync
        self._pools.stats.wait_seconds += time.perf_counter() - start
        group = self._reading.popleft()
        failure = self._settle(group)
        if failure is not None:
            raise failure
        if self._staging is not None:
            self._move_in(group)
        return group.experts

    def _settle(self, group: _Group) -> BaseException | None:
        """End a group's reads; enter what they put into slots into the table, give the slots of a failed one back."""
        pool, stats, failure = self._pool, self._pools.stats, None
        for n, run in enumerate(group.runs):
            read = group.reads[n] if n < len(group.reads) else None  # broken off before it was asked for
            error = InterruptedError() if read is None else read.exception()
            buffers = None
            if read is not None and error is None:
                read_bytes, buffers = read.result()
                stats.reads += 1
                stats.read_bytes += read_bytes
            failure = failure or error
            if self._staging is None:
                for i, (expert, slot) in enumerate(run):
                    pool.settle(expert, slot, ok=error is None)
                    if buffers is not None:
                        pool.store_staged(slot, buffers[i])
        return failure

    def _move_in(self, group: _Group) -> None:
        """Let a group that lies in staging rows have slots. The products of those that were there are under way."""
        row = {expert: row for run in group.runs for expert, row in run}
        claims = self._claim(group.experts)
        moved = self._pool.filled([slot for _, slot in claims], [row[expert] for expert, _ in claims])
        self._protected.update(group.experts)
        for expert, slot in claims:
            self._pool.settle(expert, slot, ok=True)
        if moved is not None:
            self._moves.append(moved)


def _stock_call(module: Streamed) -> Callable[..., mx.array]:
    """`__call__` of the class that `moe.stream` has changed."""
    return cast("Callable[..., mx.array]", cast(Any, super(Streamed, module)).__call__.__func__)
