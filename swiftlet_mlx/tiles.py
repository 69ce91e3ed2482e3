"""What the experts in some slots make of rows that lie slot by slot, by the stock switch layer's own code.

mlx-lm's layer sorts its rows by expert and puts the results back in order; here they come in order and go to their
places later, so these two functions of it are replaced by ones that only reshape. On CUDA the rows of one expert come
in tiles as well: MLX gives every row of a gather a matrix tile of its own, sixteen rows high, and fetches the expert's
weights for it again. On the CPU, where MLX computes a stream on one thread, rows are spread over streams.

Knows the stock layers' two functions; nothing of files, groups or of what is in a slot. Invariant: each row is
multiplied with the same weights, in the same order of sums, as by the stock call; only its neighbours in a tile differ.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ._compat import GATHER_SORT, SCATTER_UNSORT, rebound
from .device import backend

LOW, HIGH = 16, 64  # rows of the smallest and the largest matrix tile that MLX's CUDA kernels have
STREAM_ROWS = 64  # worth a stream of the CPU: some milliseconds of products even in a small model
MOST_STREAMS = 16

_own = threading.local()  # a stream belongs to the thread that made it


def tile_height(n_rows: int, n_slots: int) -> int:
    """Rows of a tile for so many rows of so many slots: one where the device needs none."""
    if backend() != "cuda":
        return 1
    return HIGH if n_rows > n_slots * (LOW + HIGH) // 4 else LOW


def rows_in_tiles(stock: Callable[..., mx.array], module: Any, x: mx.array, slots: mx.array, height: int) -> mx.array:
    """Compute rows that lie in tiles.

    Args:
        stock: `__call__` of the stock switch layer's class.
        module: whose projections hold slots.
        x: `[T x height, H]`.
        slots: `[T]` the slot of each tile, those of one slot side by side.
        height: rows of a tile.

    Returns:
        Lazy `[T x height, H]`.
    """
    streams = _streams(x.shape[0] // STREAM_ROWS) if backend() == "cpu" else []
    if len(streams) < 2:
        return _rows(stock, module, x, slots, height)
    parts, cuts = [], [slots.size * n // len(streams) for n in range(len(streams) + 1)]
    for stream, (a, b) in zip(streams, pairwise(cuts), strict=True):
        with mx.stream(stream):
            parts.append(_rows(stock, module, x[a * height : b * height], slots[a:b], height))
    return mx.concatenate(parts)


def _streams(most: int) -> list[mx.Stream]:
    """Streams of this thread to compute on at the same time, one a core."""
    made: list[mx.Stream] = _own.__dict__.setdefault("streams", [])
    count = min(most, os.cpu_count() or 1, MOST_STREAMS)
    while len(made) < count:
        made.append(mx.new_stream(mx.Device(mx.cpu)))
    return made[:count]


def _rows(stock: Callable[..., mx.array], module: Any, x: mx.array, slots: mx.array, height: int) -> mx.array:
    of_rows = mx.broadcast_to(slots[:, None], (slots.size, height)).reshape(-1, 1)
    if takes_tiles(stock):

        def as_they_are(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, None]:
            """`[T x height, 1, 1, H]` to `[T, height, H]`. What one slot a row would take is never evaluated."""
            return x.reshape(-1, height, x.shape[-1]), slots, None

        def back(x: mx.array, order: None, shape: tuple[int, ...]) -> mx.array:
            return x.reshape(*shape, 1, x.shape[-1])

        stock = rebound(stock, **{GATHER_SORT: as_they_are, SCATTER_UNSORT: back})
    return stock(module, x, of_rows)[:, 0]


def takes_tiles(stock: Callable[..., mx.array]) -> bool:
    """Whether a stock call sorts by the two functions; if not, it gets its rows in order and sorts them again."""
    code = getattr(stock, "__code__", None)
    return code is not None and {GATHER_SORT, SCATTER_UNSORT} <= set(code.co_names)
