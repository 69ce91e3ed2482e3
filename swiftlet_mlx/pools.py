"""All slot pools of one model: which experts are fetched when, and the fence that keeps the slots' invariant.

    A slot is overwritten only when no unevaluated graph can read it.

Whatever a streamed layer returned last is evaluated together with the next router choice (`read_back`, `choice`),
before any slot changes hands. Only the thread that owns the model may call anything here but `ask_for`; read threads
touch bytes alone. Residency belongs to one model instance: two models in one process share nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .read_threads import ReadThreads
from .reader import ExpertSource
from .slots import EMPTY, SlotPool
from .stats import Stats

T = TypeVar("T")

# A layer output larger than this is evaluated at once instead of being held for the next read-back: holding it would
# keep a prompt chunk's activations alive, evaluating it costs one synchronisation in a call that is long anyway.
HOLD_BYTES = 1 << 20
FILL_BYTES = 64 << 20  # one read of neighbouring experts when a layer is loaded whole


class Reads:
    """The reads of one layer call. All but the last run on the read threads; the last is left to the engine thread,
    which would only wait, and a single miss costs no change of threads."""

    __slots__ = ("claims", "done", "pool", "results")

    def __init__(self, pool: SlotPool, claims: list[tuple[int, int]]) -> None:
        self.pool = pool
        self.claims = claims  # (expert, slot)
        self.results: list[tuple[int, int, int, list[bytearray] | None, BaseException | None]] = []
        self.done: SimpleQueue[None] = SimpleQueue()

    def read(self, source: ExpertSource, expert: int, slot: int) -> None:
        """Fill a slot, or a staging buffer where the device does not see host writes. On any thread."""
        pool, n, staging, error = self.pool, 0, None, None
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


class Pools:
    """The slot pools, their source and their reads.

    Args:
        source: where experts are read from.
        n_slots: layer to number of slots.
        threads: that read; closed with the pools.
    """

    def __init__(self, source: ExpertSource, n_slots: Mapping[int, int], threads: ReadThreads) -> None:
        self.source = source
        self.stats = Stats()
        self.layers = {layer: SlotPool(source.tables[layer], n) for layer, n in n_slots.items()}
        self.recorder: Callable[[int, list[int]], None] | None = None
        self._threads = threads
        self._readers: list[mx.array] = []
        self._open: Reads | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in self.layers.values())

    @property
    def direct(self) -> bool:
        return all(pool.direct for pool in self.layers.values())

    # ---- the fence

    def read_back(self, indices: mx.array) -> NDArray[np.uint32]:
        """Host synchronisation: the router's choice as numbers, and with it everything that still reads a slot."""
        self._evaluate(indices)
        return np.array(indices, copy=True).astype(np.uint32, copy=False)

    def choice(self, indices: mx.array) -> list[int]:
        """The same as a flat list: half the time for a token's experts."""
        self._evaluate(indices)
        rows: Any = indices.tolist()
        for _ in range(indices.ndim - 1):
            rows = list(chain.from_iterable(rows))
        return rows  # type: ignore[no-any-return]

    def hold(self, output: mx.array) -> None:
        """Remember an array whose graph reads slots, so that the next `read_back` evaluates it first."""
        if output.nbytes > HOLD_BYTES:
            mx.eval(output)
        else:
            self._readers.append(output)

    def _evaluate(self, indices: mx.array) -> None:
        mx.eval(indices, *self._readers)
        self._readers.clear()
        self.stats.read_backs += 1

    # ---- fetching what a layer needs

    def load(self, layer: int, experts: Sequence[int]) -> None:
        """Make distinct experts of one layer resident; returns when all are.

        Must follow a `read_back` with no streamed layer built in between.

        Raises:
            ReadFailed: the first failure, after every other read of this call has ended.
        """
        reads = self.begin(self.layers[layer], experts)
        if reads is not None:
            self.finish(reads)

    def begin(self, pool: SlotPool, experts: Sequence[int]) -> Reads | None:
        """Start the reads of those that are missing; None if none is. `finish` must follow."""
        if self._readers:
            raise RuntimeError("a slot would be overwritten while an unevaluated graph may read it")
        if self._open is not None:
            self._recover(self._open)
        pool.policy.use(experts)
        slots, stats = pool.slots, self.stats
        missing = [e for e in experts if slots[e] == EMPTY]
        stats.misses += len(missing)
        stats.hits += len(experts) - len(missing)
        if not missing:
            return None
        if self._threads.closed:
            raise RuntimeError("the model's pools are closed: its experts can no longer be read")
        before = len(pool.policy.residents)
        reads = self._open = Reads(pool, pool.claim(experts))
        stats.evictions += before - len(pool.policy.residents)
        for expert, slot in reads.claims[:-1]:
            self._threads.post(reads.read, self.source, expert, slot)
        return reads

    def finish(self, reads: Reads) -> None:
        """Read the last expert, wait for the others and enter them all into the slot table.

        Raises:
            ReadFailed: the first failure; the slots of failed reads are given back empty.
        """
        start = time.perf_counter()
        reads.read(self.source, *reads.claims[-1])
        while len(reads.results) < len(reads.claims):
            reads.done.get()
        self.stats.wait_seconds += time.perf_counter() - start
        self._settle(reads)

    def _settle(self, reads: Reads) -> None:
        pool, failure = reads.pool, None
        self._open = None
        for expert, slot, read_bytes, staging, error in reads.results:
            if error is None:
                self.stats.reads += 1
                self.stats.read_bytes += read_bytes
                if staging is not None:
                    pool.store_staged(slot, staging)
            pool.settle(expert, slot, ok=error is None)
            failure = failure or error
        if failure is not None:
            raise failure

    def _recover(self, reads: Reads) -> None:
        """A layer call was broken off (Ctrl-C) between `begin` and `finish`: end its reads, keep its slots."""
        self._threads.drain()
        read = {expert for expert, *_ in reads.results}
        reads.results += [(e, slot, 0, None, InterruptedError()) for e, slot in reads.claims if e not in read]
        try:
            self._settle(reads)
        except Exception:  # nobody waits for these experts any more
            pass

    # ---- everything at once

    def fill(self) -> None:
        """Load every layer whose pool holds all its experts, so that it never needs a read-back."""
        runs = []
        for pool in self.layers.values():
            count = pool.table.expert_count
            if pool.n_slots == count and pool.direct:
                claimed = pool.claim(range(count))
                step = max(1, FILL_BYTES // pool.table.payload_bytes)
                for at in range(0, len(claimed), step):
                    run = claimed[at : at + step]
                    runs.append((pool, run, self.submit(self._read_run, pool, run)))
        wait([future for _, _, future in runs])
        for pool, run, future in runs:
            for expert, slot in run:
                pool.settle(expert, slot, ok=future.exception() is None)
        for _, _, future in runs:
            self.stats.read_bytes += future.result()
            self.stats.reads += 1

    def _read_run(self, pool: SlotPool, run: list[tuple[int, int]]) -> int:
        return self.source.read(pool.table.layer, run[0][0], [pool.rows(slot) for _, slot in run])

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work` on a read thread; it may touch bytes, no arrays."""
        return self._threads.submit(work, *args)

    def close(self) -> None:
        """End the read threads and close the files."""
        self._threads.close()
        self.source.close()
