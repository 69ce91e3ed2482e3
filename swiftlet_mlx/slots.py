"""The slot pool: resident expert arrays, the table that says who is where, and the one place bytes become arrays.

A pool holds one MLX array a section, `[n_slots, *section shape]`, and reads experts from disk straight into the
arrays' memory. MLX does not see such a write: a graph built before it and evaluated after it computes with the new
bytes. Hence the invariant of this module:

    A slot is overwritten only when no unevaluated graph can read it.

It is kept by `Pools.read_back`: whatever a streamed layer returned last is evaluated together with the next router
choice, before any slot changes hands. And since `gather_qmm` checks no index, the slot table is the check: an expert
without a slot raises here. A failed read leaves its slot empty, never half old and half new.
Only the thread that owns the model may call anything here; I/O threads touch bytes alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .policy import LFU
from .qpack import LayerTable
from .reader import ExpertSource, Rows
from .stats import Stats

T = TypeVar("T")

# Safetensors tags to MLX types. FP8 and scale types travel as raw bytes, as mlx_lm.convert stores them.
DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8,
    "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
}  # fmt: skip
EMPTY = 0xFFFFFFFF

# A layer output larger than this is evaluated at once instead of being held for the next read-back: holding it would
# keep a prompt chunk's activations alive, evaluating it costs one synchronisation in a call that is long anyway.
HOLD_BYTES = 1 << 20
FILL_BYTES = 64 << 20  # one read of neighbouring experts when a layer is loaded whole

# An expert, its slot, and the read that returns (bytes read, staging buffers or None).
PendingRead = tuple[int, int, "Future[tuple[int, list[bytearray] | None]]"]


class SlotPool:
    """The resident experts of one layer.

    Attributes:
        arrays: Section name to array `[n_slots, *section shape]`. Their memory is written behind MLX's back.
        slots: `[expert_count]` uint32, the slot of each expert or EMPTY.
        direct: False if the device does not see host writes and fills are staged through copies.
    """

    def __init__(self, table: LayerTable, n_slots: int) -> None:
        self.table = table
        self.n_slots = n_slots
        self.slots: NDArray[np.uint32] = np.full(table.expert_count, EMPTY, np.uint32)
        self.policy = LFU()
        self._free = list(range(n_slots - 1, -1, -1))
        self.arrays = {s.name: mx.zeros((n_slots, *s.shape), DTYPES[s.dtype]) for s in table.sections}
        mx.eval(*self.arrays.values())
        self._views = {name: memoryview(cast(Any, a)).cast("B") for name, a in self.arrays.items()}
        self.direct = self._sees_host_writes()

    @property
    def nbytes(self) -> int:
        return self.n_slots * self.table.payload_bytes

    @property
    def complete(self) -> bool:
        """Whether every expert is resident; expert e is then in slot e and needs no table."""
        return len(self.policy.residents) == self.table.expert_count

    def claim(self, experts: Sequence[int], protected: Iterable[int] = ()) -> list[tuple[int, int]]:
        """Give a slot to each expert that has none, evicting where needed. The slots are empty until `settle`.

        Args:
            experts: Distinct experts wanted now, at most `n_slots` together with `protected`.
            protected: Further residents that must stay.

        Returns:
            (expert, slot) of those to be read, in the order of `experts`.
        """
        missing = [e for e in experts if self.slots[e] == EMPTY]
        keep = {*experts, *protected}
        return [(e, self._take(e, keep)) for e in missing]

    def settle(self, expert: int, slot: int, ok: bool) -> None:
        """A claimed slot was filled, or (not `ok`) is given back empty."""
        if ok:
            self.slots[expert] = slot
            self.policy.add(expert)
        else:
            self._free.append(slot)

    def rows(self, slot: int) -> Rows:
        """Writable byte views of one slot, one a section."""
        return [self._views[s.name][slot * s.size : (slot + 1) * s.size] for s in self.table.sections]

    def lookup(self, experts: NDArray[np.uint32]) -> mx.array:
        """Slots of experts that are all resident, same shape, uint32.

        Raises:
            LookupError: for an expert without a slot, which a gather would silently read as garbage.
        """
        slots = self.slots[experts]
        if slots.size and slots.max() == EMPTY:
            raise LookupError(f"layer {self.table.layer}: an expert is used without being resident")
        return mx.array(slots)

    def store_staged(self, slot: int, staging: Sequence[bytearray]) -> None:
        """Fill one slot by a copy that MLX sees; for devices that do not see host writes."""
        for section, data in zip(self.table.sections, staging, strict=True):
            value = mx.array(np.frombuffer(data, np.uint8)).view(DTYPES[section.dtype]).reshape(section.shape)
            self.arrays[section.name][slot] = value
        mx.eval(*self.arrays.values())

    def _take(self, expert: int, keep: set[int]) -> int:
        if self.n_slots == self.table.expert_count:
            self._free.remove(expert)  # everything fits: expert e lives in slot e
            return expert
        if self._free:
            return self._free.pop()
        victim = self.policy.victim(keep)
        slot = int(self.slots[victim])
        self.policy.remove(victim)
        self.slots[victim] = EMPTY
        return slot

    def _sees_host_writes(self) -> bool:
        """Write a pattern through the view, let the device compute on it, twice; leave the slot zeroed."""
        section = self.table.sections[0]
        view, array = self._views[section.name][: section.size], self.arrays[section.name]
        n = min(section.size, 4096)
        seen = True
        for byte in (0x5A, 0xA5, 0x00):
            view[:n] = bytes([byte]) * n
            # a new graph each time: the device must not answer from anything it kept
            total = mx.sum(array[0].reshape(-1).view(mx.uint8)[:n].astype(mx.uint32))
            seen = seen and total.item() == byte * n
        return seen


class Pools:
    """All slot pools of one model, their source, their reads and the fence that keeps the invariant.

    Residency belongs to one model instance: two models in one process share nothing.
    """

    def __init__(self, source: ExpertSource, n_slots: Mapping[int, int], executor: ThreadPoolExecutor) -> None:
        self.source = source
        self.stats = Stats()
        self.layers = {layer: SlotPool(source.tables[layer], n) for layer, n in n_slots.items()}
        self._executor = executor
        self._readers: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, which never change after construction."""
        return sum(pool.nbytes for pool in self.layers.values())

    @property
    def direct(self) -> bool:
        return all(pool.direct for pool in self.layers.values())

    def read_back(self, indices: mx.array) -> NDArray[np.uint32]:
        """Host synchronisation: the router's choice as numbers, and with it everything that still reads a slot."""
        mx.eval(indices, *self._readers)
        self._readers.clear()
        self.stats.read_backs += 1
        return np.array(indices, copy=True).astype(np.uint32, copy=False)

    def hold(self, output: mx.array) -> None:
        """Remember an array whose graph reads slots, so that the next `read_back` evaluates it first."""
        if output.nbytes > HOLD_BYTES:
            mx.eval(output)
        else:
            self._readers.append(output)

    def load(self, layer: int, experts: Sequence[int]) -> None:
        """Make distinct experts of one layer resident; returns when all are.

        Must follow a `read_back` with no streamed layer built in between.

        Raises:
            ReadFailed: the first failure, after every other read of this call has ended.
        """
        self.finish(layer, self.begin(layer, experts))

    def begin(self, layer: int, experts: Sequence[int]) -> list[PendingRead]:
        """Start the reads of those that are missing; pass the result to `finish`, also after an error elsewhere."""
        if self._readers:
            raise RuntimeError("a slot would be overwritten while an unevaluated graph may read it")
        pool = self.layers[layer]
        residents = len(pool.policy.residents)
        claims = pool.claim(experts)
        pool.policy.use(experts)
        self.stats.misses += len(claims)
        self.stats.hits += len(experts) - len(claims)
        self.stats.evictions += residents - len(pool.policy.residents)
        return [(e, slot, self._executor.submit(self._read, pool, e, slot)) for e, slot in claims]

    def finish(self, layer: int, reads: list[PendingRead]) -> None:
        """Wait for reads that `begin` started and enter them into the slot table."""
        if not reads:
            return
        start = time.perf_counter()
        wait([future for _, _, future in reads])
        self.stats.wait_seconds += time.perf_counter() - start
        failure: BaseException | None = None
        pool = self.layers[layer]
        for expert, slot, future in reads:
            error = future.exception()
            pool.settle(expert, slot, ok=error is None)
            if error is None:
                read_bytes, staging = future.result()
                self.stats.reads += 1
                self.stats.read_bytes += read_bytes
                if staging is not None:
                    pool.store_staged(slot, staging)
            failure = failure or error
        if failure is not None:
            raise failure

    def fill(self) -> None:
        """Load every layer whose pool holds all its experts, so that it never needs a read-back."""
        runs = []
        for pool in self.layers.values():
            count = pool.table.expert_count
            if pool.n_slots == count and pool.direct:
                claimed = pool.claim(range(count))
                step = max(1, FILL_BYTES // pool.table.payload_bytes)
                for at in range(0, count, step):
                    run = claimed[at : at + step]
                    runs.append((pool, run, self._executor.submit(self._read_run, pool, run)))
        wait([future for _, _, future in runs])
        for pool, run, future in runs:
            self.stats.read_bytes += future.result()
            self.stats.reads += 1
            for expert, slot in run:
                pool.settle(expert, slot, ok=True)

    def _read_run(self, pool: SlotPool, run: list[tuple[int, int]]) -> int:
        return self.source.read(pool.table.layer, run[0][0], [pool.rows(slot) for _, slot in run])

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work` on an I/O thread; it may touch bytes, no arrays."""
        return self._executor.submit(work, *args)

    def close(self) -> None:
        """Stop the I/O threads and close the files."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self.source.close()

    def _read(self, pool: SlotPool, expert: int, slot: int) -> tuple[int, list[bytearray] | None]:
        """On an I/O thread: fill the slot, or a staging buffer where the device does not see host writes."""
        if pool.direct:
            return self.source.read(pool.table.layer, expert, [pool.rows(slot)]), None
        staging = [bytearray(s.size) for s in pool.table.sections]
        return self.source.read(pool.table.layer, expert, [[memoryview(b) for b in staging]]), staging
