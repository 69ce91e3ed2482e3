"""The slots of one layer: resident expert arrays, the table that says who is where, and the place bytes become arrays.

A pool holds one MLX array a section, `[n_slots, *section shape]`, and experts are read from disk straight into the
arrays' memory. MLX does not see such a write: a graph built before it and evaluated after it computes with the new
bytes. Hence the invariant, kept by pools.py:

    A slot is overwritten only when no unevaluated graph can read it.

And since `gather_qmm` checks no index, the slot table is the check: an expert without a slot raises here. A failed
read leaves its slot empty, never half old and half new. On CUDA slots lie in the device's memory, and what was read
goes there by way of cuda.py. Knows neither files nor threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .choice import Numbers
from .cuda import Mover, Staging
from .layout import LayerTable
from .policy import LFU
from .reader import Rows

# Safetensors tags to MLX types. FP8 and scale types travel as raw bytes, as mlx_lm.convert stores them.
DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8,
    "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
}  # fmt: skip
EMPTY = 0xFFFFFFFF


class SlotPool:
    """The resident experts of one layer.

    Attributes:
        arrays: Section name to array `[n_slots, *section shape]`. Their memory is written behind MLX's back.
        slots: The slot of each expert, or EMPTY.
        complete: Whether every expert is resident; expert e is then in slot e and needs no table.
        direct: False if the device does not see host writes and fills are staged through copies.
        staging: Host memory on the way to slots that lie in memory of the device, where there is such memory.
    """

    def __init__(self, table: LayerTable, n_slots: int, staging: Staging | None = None) -> None:
        self.table = table
        self.n_slots = n_slots
        self.slots = [EMPTY] * table.expert_count
        self.complete = False
        self.policy = LFU()
        self.staging = staging
        self.arrays = {s.name: mx.zeros((n_slots, *s.shape), DTYPES[s.dtype]) for s in table.sections}
        self._free = list(range(n_slots - 1, -1, -1))
        self._users: list[Callable[[SlotPool], None]] = []
        self._views: list[tuple[memoryview, int]] = []
        self._mover: Mover | None = None
        self._numbers: dict[tuple[int, ...], Numbers] = {}
        self._torn = False  # true while arrays are replaced one by one, and after that was broken off
        mx.eval(*self.arrays.values())
        self._look()
        self.direct = staging is not None or self._sees_host_writes()
        if not self.direct:
            self._views.clear()  # a staged fill replaces the arrays' memory; a view would keep the old alive

    @property
    def nbytes(self) -> int:
        return self.n_slots * self.table.payload_bytes

    @property
    def n_free(self) -> int:
        """Slots that hold nobody and are claimed for nobody."""
        return len(self._free)

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
            self.complete = len(self.policy.residents) == self.table.expert_count
        elif slot not in self._free:  # may be said twice, where Ctrl-C came between
            self._free.append(slot)

    def mend(self) -> None:
        """After a call that may have been broken off at any line: slots that the table gives to nobody are free, and
        arrays of different sizes lose their experts. No read may be under way."""
        if self._torn:
            self._renew()
        self.policy.mend(e for e, slot in enumerate(self.slots) if slot != EMPTY)
        self._free = sorted({*range(self.n_slots)}.difference(self.slots), reverse=True)
        self.complete = len(self.policy.residents) == self.table.expert_count

    def rows(self, slot: int) -> Rows:
        """Writable byte views for the expert of one slot, one a section. `filled` must follow."""
        if self._mover is not None:
            return self._mover.rows(slot)
        return [view[slot * size : (slot + 1) * size] for view, size in self._views]

    def filled(self, slots: Sequence[int], rows: Sequence[int] | None = None) -> mx.array | None:
        """What was written into the rows of these slots is whole: what is evaluated from now on sees it.

        Args:
            slots: To be filled.
            rows: With staging, the row each expert was written to; None for the one with the slot's number.

        Returns:
            With staging, an array that has been evaluated when those rows may be written again.
        """
        if self._mover is None or not slots:
            return None
        return self._mover.move(slots, rows)

    def lookup(self, experts: NDArray[np.uint32]) -> mx.array:
        """Slots of experts that are all resident, same shape, uint32.

        Raises:
            LookupError: for an expert without a slot, which a gather would silently read as garbage.
        """
        slots = np.array(self.slots, np.uint32)[experts]
        if slots.size and slots.max() == EMPTY:
            raise self._absent()
        return mx.array(slots)

    def lookup_few(
        self, experts: list[int], shape: tuple[int, ...], claimed: Mapping[int, int] | None = None
    ) -> mx.array:
        """The same for a flat list: a fifth of the time for a token's experts.

        Args:
            experts: flat.
            shape: of the result.
            claimed: slots of experts that are being read and will be resident before anything is evaluated.
        """
        slots = [self.slots[e] for e in experts]
        if claimed:
            slots = [claimed.get(e, slot) for e, slot in zip(experts, slots, strict=True)]
        slots = self._all_resident(slots)
        few = self.staging.numbers(slots) if self.staging is not None else mx.array(slots, mx.uint32)
        return few.reshape(shape)

    def lookup_later(self, shape: tuple[int, ...]) -> mx.array:
        """An array for slot numbers that `tell` will write: the same for each call of a shape."""
        numbers = self._numbers.get(shape)
        if numbers is None:
            numbers = self._numbers[shape] = Numbers(shape, far=self.staging is not None)
        return numbers.array

    def tell(self, experts: list[int], shape: tuple[int, ...]) -> None:
        """Write the slots of resident experts, flat, into the array that `lookup_later` gave.

        Raises:
            LookupError: for an expert without a slot.
        """
        self._numbers[shape].write(self._all_resident([self.slots[e] for e in experts]))

    def store_staged(self, slot: int, staging: Sequence[bytearray]) -> None:
        """Fill one slot by a copy that MLX sees; for devices that do not see host writes."""
        for section, data in zip(self.table.sections, staging, strict=True):
            value = mx.array(np.frombuffer(data, np.uint8)).view(DTYPES[section.dtype]).reshape(section.shape)
            self.arrays[section.name][slot] = value
        mx.eval(*self.arrays.values())

    def on_arrays(self, use: Callable[[SlotPool], None]) -> None:
        """Call `use` now and whenever `arrays` holds new arrays."""
        self._users.append(use)
        use(self)

    def resize(self, n_slots: int) -> None:
        """Change the number of slots; the residents that are worth most stay. Memory is freed section by section.

        Everything that reads the arrays must have been evaluated, or their memory lives until it is.
        """
        self._torn, self.complete = True, False
        while len(self.policy.residents) > n_slots:
            self.slots[self.policy.evict()] = EMPTY
        whole = n_slots == self.table.expert_count
        residents = sorted(self.policy.residents)
        target = {e: e if whole else n for n, e in enumerate(residents)}
        rows = [0] * n_slots  # a free slot gets a copy of whatever is in slot 0
        for e in residents:
            rows[target[e]] = self.slots[e]
            self.slots[e] = target[e]
        self._views.clear()
        self._mover = None  # it holds the old arrays, too
        taken = mx.array(rows, mx.uint32)
        for name in list(self.arrays):
            self.arrays[name] = self.arrays[name][taken]
            mx.eval(self.arrays[name])
            for use in self._users:
                use(self)
            mx.synchronize()  # a stream lets go of its inputs a moment after it has announced the result
            mx.clear_cache()
        self.n_slots = n_slots
        if self.direct:
            self._look()
        self._torn = False
        self.mend()

    def _renew(self) -> None:
        """Begin again with empty slots."""
        self.slots[:] = [EMPTY] * self.table.expert_count
        self._views.clear()
        self._mover = None
        for s in self.table.sections:
            self.arrays[s.name] = mx.zeros((self.n_slots, *s.shape), DTYPES[s.dtype])
            mx.eval(self.arrays[s.name])
        for use in self._users:
            use(self)
        if self.direct:
            self._look()
        self._torn = False

    def _take(self, expert: int, keep: set[int]) -> int:
        if self.n_slots == self.table.expert_count:
            self._free.remove(expert)  # everything fits: expert e lives in slot e
            return expert
        if self._free:
            return self._free.pop()
        victim = self.policy.evict(keep)
        slot = self.slots[victim]
        self.slots[victim] = EMPTY
        return slot

    def _look(self) -> None:
        """Find out where bytes for the arrays are to be written, in the order of the sections."""
        sections = self.table.sections
        if self.staging is None:
            self._views = [(memoryview(cast(Any, self.arrays[s.name])).cast("B"), s.size) for s in sections]
            return
        self.staging.reserve(self.table.payload_bytes, self.n_slots)
        self._mover = self.staging.mover([s.size for s in sections], [self.arrays[s.name] for s in sections])

    def _sees_host_writes(self) -> bool:
        """Write a pattern through the view, let the device compute on it, twice; leave the slot zeroed."""
        view, size = self._views[0]
        array = self.arrays[self.table.sections[0].name]
        n = min(size, 4096)
        seen = True
        for byte in (0x5A, 0xA5, 0x00):
            view[:n] = bytes([byte]) * n
            # a new graph each time: the device must not answer from anything it kept
            total = mx.sum(array[0].reshape(-1).view(mx.uint8)[:n].astype(mx.uint32))
            seen = seen and total.item() == byte * n
        return seen

    def _all_resident(self, slots: list[int]) -> list[int]:
        if EMPTY in slots:
            raise self._absent()
        return slots

    def _absent(self) -> LookupError:
        return LookupError(f"layer {self.table.layer}: an expert is used without being resident")
