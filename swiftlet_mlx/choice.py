"""Expert numbers on their way from a router to the host, and slot numbers on their way back.

Knows lazy arrays and how small numbers cross to a device with memory of its own; nothing of pools or reads. Invariant:
`Numbers` are written only while no graph that was built on them is unevaluated, but for the one they are meant for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import mlx.core as mx

from . import cuda


@dataclass(frozen=True, slots=True)
class Guess:
    """What a layer will probably need: a lazy array of expert numbers."""

    layer: int
    experts: mx.array


class Asked:
    """Lazy arrays of expert numbers that the host wants.

    Args:
        arrays: uint32, of any shape.
        limit: what all numbers are below.
        far: whether the device has memory of its own. Few numbers then cross as words.
    """

    def __init__(self, arrays: Sequence[mx.array], limit: int, far: bool) -> None:
        self._arrays, self._limit = arrays, limit
        self._words: list[list[mx.array]] | None = None
        if far and all(cuda.fits_words(a.size, limit) for a in arrays):
            self._words = [cuda.pack(a, limit) for a in arrays]

    @property
    def lazy(self) -> list[mx.array]:
        """What is to be evaluated."""
        return [*self._arrays] if self._words is None else [*chain.from_iterable(self._words)]

    def numbers(self) -> list[list[int]]:
        """Of each array, flat. Host synchronisation: waits until they are evaluated."""
        if self._words is None:
            return [_flat(a) for a in self._arrays]
        return [cuda.unpack(w, a.size, self._limit) for w, a in zip(self._words, self._arrays, strict=True)]


class Numbers:
    """A few numbers that the host writes behind MLX's back, after graphs have been built on them.

    Args:
        shape: of the array.
        far: whether the device has memory of its own.

    Attributes:
        array: uint32.
    """

    def __init__(self, shape: tuple[int, ...], far: bool) -> None:
        if far:
            self.array = cuda.shared(shape, mx.uint32)
        else:
            self.array = mx.zeros(shape, mx.uint32)
            mx.eval(self.array)
        self._view = memoryview(cast(Any, self.array)).cast("B").cast("I")

    def write(self, values: Sequence[int]) -> None:
        """As many as there are places."""
        view = self._view
        for n, value in enumerate(values):
            view[n] = value


def _flat(indices: mx.array) -> list[int]:
    rows: Any = indices.tolist()
    for _ in range(indices.ndim - 1):
        rows = list(chain.from_iterable(rows))
    return rows  # type: ignore[no-any-return]
