"""What the experts in some slots make of rows that are sorted by slot, by the stock switch layer's own code.

mlx-lm's layer sorts its rows by expert and puts the results back in order; here they come sorted and go to their places
later, so these two functions of it are replaced by ones that only reshape. On CUDA rows of one expert are laid out in
tiles as well: MLX gives every row of a gather a matrix tile of its own, sixteen rows high, and fetches the expert's
weights for it again.

Knows the stock layers' two functions and NumPy indices; nothing of files, slots or groups. Invariant: each row is
multiplied with the same weights, in the same order of sums, as by the stock call; only its neighbours in a tile differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ._compat import rebound
from .device import backend

Ints = NDArray[np.int64]

SORT, UNSORT = "_gather_sort", "_scatter_unsort"  # of mlx_lm.models.switch_layers
LOW, HIGH = 16, 64  # rows of the smallest and the largest matrix tile that MLX's CUDA kernels have


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows in tiles of equal height, each tile of one slot; the last of a slot is filled up with its first row."""

    rows: Ints
    """`[T x height]` which of the rows lies here."""
    slots: NDArray[np.uint32]
    """`[T x height]` the slot that computes it."""
    places: Ints
    """`[P]` where each row lies."""


def lay_out(slots: NDArray[np.uint32], height: int) -> Layout:
    """Put rows into tiles.

    Args:
        slots: `[P]` of each row, those of one slot side by side.
        height: rows of a tile.
    """
    starts = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
    counts = np.diff(np.append(starts, len(slots)))
    tiles = -(-counts // height)
    firsts = (np.cumsum(tiles) - tiles) * height  # where the rows of each slot begin
    places = np.repeat(firsts - starts, counts) + np.arange(len(slots))
    rows = np.repeat(starts, tiles * height)
    rows[places] = np.arange(len(slots))
    return Layout(rows, np.repeat(slots[starts], tiles * height), places)


def tile_height(n_rows: int, n_slots: int) -> int:
    """Rows of a tile for so many rows of so many slots: one where the device needs none."""
    if backend() != "cuda":
        return 1
    return HIGH if n_rows > n_slots * (LOW + HIGH) // 4 else LOW


def sorted_rows(
    stock: Callable[..., mx.array], module: Any, x: mx.array, rows: Ints, slots: NDArray[np.uint32], height: int
) -> mx.array:
    """Compute rows of x.

    Args:
        stock: `__call__` of the stock switch layer's class.
        module: whose projections hold slots.
        x: `[N, H]`.
        rows: `[P]` rows of x to compute.
        slots: `[P]` the slot for each, those of one slot side by side.
        height: rows of a tile, one for none.

    Returns:
        Lazy `[P, H]`.
    """
    call = _without_sort(stock, height)
    if call is None or height == 1:
        y = (call or stock)(module, x[_index(rows)], mx.array(slots)[:, None])
        return y[:, 0]
    at = lay_out(slots, height)
    y = call(module, x[_index(rows[at.rows])], mx.array(at.slots)[:, None])
    return y[:, 0][_index(at.places)]


@functools.cache
def _without_sort(stock: Callable[..., mx.array], height: int) -> Callable[..., mx.array] | None:
    """The stock call, taking rows as they come; None if it is written in another way."""
    code = getattr(stock, "__code__", None)
    if code is None or not {SORT, UNSORT} <= set(code.co_names):
        return None

    def into_tiles(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, None]:
        """`[P, 1, 1, H]` and `[P, 1]` to `[T, height, H]` and `[T]`."""
        slots = indices.flatten() if height == 1 else mx.contiguous(indices.reshape(-1, height)[:, 0])
        return x.reshape(-1, height, x.shape[-1]), slots, None

    def out_of_tiles(x: mx.array, order: None, shape: tuple[int, ...]) -> mx.array:
        return x.reshape(*shape, 1, x.shape[-1])

    return rebound(stock, **{SORT: into_tiles, UNSORT: out_of_tiles})


def _index(places: Ints) -> mx.array:
    return mx.array(places.astype(np.uint32))
