"""Slots on CUDA, where host and device do not share memory.

Experts are read into a staging buffer of the host that the device reaches in place, and one kernel moves what was read
into slots that lie in device memory. Small numbers that cross between the two in each layer go through memory that both
reach, because pages that migrate cost up to half a millisecond a time (H200, 2026-12). Knows addresses, the driver's
advice and one kernel; nothing of experts or files. Invariants: a staging row is written again only after the move out
of it has been evaluated, which the fence of pools.py ensures; a move is launched before anything that reads the slots.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import mlx.core as mx

from .device import backend

_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5  # cudaMemoryAdvise
_DEVICE, _HOST = 1, 2  # cudaMemLocationType
_UNITS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
_THREADS = 256  # of a block
# Lists in flight at once: a layer call writes three at most and is evaluated by the read-back of the next.
_LISTS, _LIST_LENGTH = 64, 2049
# What crosses as one number of 8 bytes: MLX keeps those where both sides reach them.
_WORD_BITS, _MOST_WORDS = 64, 4

Rows = list[memoryview]


class Staging:
    """Host memory, one row a slot of the largest layer, through which the layers fill their slots in turn."""

    def __init__(self) -> None:
        self._n_rows = self._row_bytes = 0
        self._array = mx.zeros(1, mx.uint8)
        self._view = memoryview(b"")
        self._numbers = shared(_LISTS * _LIST_LENGTH, mx.uint32)
        self._rows = [
            memoryview(cast(Any, self._numbers)).cast("B").cast("I")[n * _LIST_LENGTH : (n + 1) * _LIST_LENGTH]
            for n in range(_LISTS)
        ]
        self._next = 0
        # MLX takes the memory of an array back when the last reference goes, launched or not. What a move has still to
        # write must not meanwhile be the place of some number that the host has just written for a later kernel.
        self._moved: deque[mx.array] = deque(maxlen=_LISTS)

    def reserve(self, row_bytes: int, n_rows: int) -> None:
        """Have rows of at least this size, at least so many. Nothing may be on its way through the old ones."""
        if row_bytes <= self._row_bytes and n_rows <= self._n_rows:
            return
        self._row_bytes = max(self._row_bytes, -(-row_bytes // 16) * 16)
        self._n_rows = max(self._n_rows, n_rows)
        self._view = memoryview(b"")  # lets go of the old ones
        self._array = shared(self._row_bytes * self._n_rows, mx.uint8)
        self._view = memoryview(cast(Any, self._array)).cast("B")

    def row(self, slot: int) -> memoryview:
        """Where the bytes of the expert for this slot are to be written."""
        at = slot * self._row_bytes
        return self._view[at : at + self._row_bytes]

    def numbers(self, values: Sequence[int]) -> mx.array:
        """A few unsigned numbers as an array `[len(values)]`, without a page that migrates."""
        n = self._next = (self._next + 1) % _LISTS
        row = self._rows[n]
        for i, value in enumerate(values):
            row[i] = value
        return self._numbers[n * _LIST_LENGTH : n * _LIST_LENGTH + len(values)]

    def mover(self, sizes: Sequence[int], arrays: Sequence[mx.array]) -> Mover:
        """What fills the slots of one layer.

        Args:
            sizes: Bytes of each section of an expert.
            arrays: One a section, `[n_slots, ...]`, on the device.
        """
        return Mover(self, sizes, arrays)


class Mover:
    """Moves experts from staging rows to the slots of one layer."""

    def __init__(self, staging: Staging, sizes: Sequence[int], arrays: Sequence[mx.array]) -> None:
        self._staging, self._arrays = staging, list(arrays)
        self._bounds = list(pairwise(accumulate(sizes, initial=0)))
        self._unit = math.gcd(16, *sizes)
        self._kernel = _kernel(tuple(sizes), self._unit)

    def rows(self, slot: int) -> Rows:
        """Writable views for the bytes of one expert, one a section."""
        row = self._staging.row(slot)
        return [row[start:stop] for start, stop in self._bounds]

    def move(self, slots: Sequence[int], rows: Sequence[int] | None = None) -> mx.array:
        """Launch the move of what lies in staging rows to slots; what is evaluated later sees it.

        Args:
            slots: To fill.
            rows: The staging row of each; None for the one with the slot's number.

        Returns:
            An array that has been evaluated when the rows may be written again.
        """
        staging = self._staging
        numbers = staging.numbers([len(slots), *slots, *(slots if rows is None else rows)])
        units = self._bounds[-1][1] // self._unit
        (moved,) = self._kernel(
            inputs=[staging._array, numbers, *self._arrays],
            template=[("ROW", staging._row_bytes // self._unit)],
            grid=(len(slots) * units, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.uint32],
        )
        mx.async_eval(moved)  # type: ignore[no-untyped-call]
        staging._moved.append(moved)
        return cast("mx.array", moved)


@functools.cache
def _kernel(sizes: tuple[int, ...], unit: int) -> Callable[..., Any]:
    """The kernel that moves experts whose sections have these sizes. It writes to its inputs: MLX knows nothing of
    it, as it knows nothing of what the host writes where memory is shared."""
    units = [size // unit for size in sizes]
    ends = list(accumulate(units))
    cases = "".join(
        f"    else if (u < {end}) (({_UNITS[unit]}*)section{n})[slot * {count} + (u - {end - count})] = v;\n"
        for n, (end, count) in enumerate(zip(ends, units, strict=True))
    )
    source = f"""
  const size_t n = moves[0];
  const size_t step = (size_t)gridDim.x * blockDim.x;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n * {ends[-1]}; i += step) {{
    const size_t m = i / {ends[-1]}, u = i % {ends[-1]}, slot = moves[1 + m], row = moves[1 + n + m];
    const {_UNITS[unit]} v = ((const {_UNITS[unit]}*)staging)[row * ROW + u];
    if (false) {{}}
{cases}  }}
  if (blockIdx.x == 0 && threadIdx.x == 0) moved[0] = n;
"""
    kernel: Any = mx.fast.cuda_kernel(
        name=f"move_experts_{len(sizes)}",
        input_names=["staging", "moves", *(f"section{n}" for n in range(len(sizes)))],
        output_names=["moved"],
        source=source,
    )
    return kernel  # type: ignore[no-any-return]


def fits_words(count: int, limit: int) -> bool:
    """Whether `pack` takes so many numbers below `limit`."""
    return count <= _WORD_BITS // _bits(limit) * _MOST_WORDS


def pack(numbers: mx.array, limit: int) -> list[mx.array]:
    """Lazy words of 64 bits that hold the numbers of an array, all below `limit`, in order."""
    bits = _bits(limit)
    each = _WORD_BITS // bits
    flat = numbers.reshape(-1).astype(mx.uint64)
    parts = [flat[at : at + each] for at in range(0, flat.size, each)]
    return [mx.left_shift(part, _shifts(part.size, bits)).sum() for part in parts]


def unpack(words: Sequence[mx.array], count: int, limit: int) -> list[int]:
    """The numbers of evaluated words."""
    bits = _bits(limit)
    each, mask = _WORD_BITS // bits, (1 << bits) - 1
    values = [cast("int", word.item()) for word in words]
    return [values[i // each] >> bits * (i % each) & mask for i in range(count)]


@functools.cache
def _shifts(count: int, bits: int) -> mx.array:
    return mx.array([bits * n for n in range(count)], mx.uint64)  # made of numbers: belongs to no thread's stream


def _bits(limit: int) -> int:
    return max(1, (limit - 1).bit_length())


def shared(shape: int | tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Zeros that the host writes and the device reads where they are.

    Args:
        shape: of the array.
        dtype: of the array.
    """
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    view = memoryview(cast(Any, array)).cast("B")  # from here on it is memory of both
    _keep_on_host(view)
    view[:] = bytes(len(view))  # only now, told where to be, are its pages those of the host
    return array


def _keep_on_host(view: memoryview) -> None:
    """Pages the host has written migrate to the device a few at a time, at about 4 GB/s; advised, they stay."""
    advise = _advise() if backend() == "cuda" else None
    if advise is not None and view.nbytes:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        advise(address, view.nbytes, _PREFERRED_LOCATION, _Location(_HOST, 0))
        advise(address, view.nbytes, _ACCESSED_BY, _Location(_DEVICE, 0))


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


@functools.cache
def _advise() -> Callable[..., int] | None:
    """The runtime library's function; MLX has loaded the library already."""
    for name in ("libcudart.so.13", "libcudart.so"):
        try:
            function = ctypes.CDLL(name).cudaMemAdvise
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, _Location]
        return function
    return None
