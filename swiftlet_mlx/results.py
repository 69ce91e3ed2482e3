"""Where the results of a layer's routed experts are collected while they are computed group by group.

Two ways, one interface: every result in a row of its own, to be added up by the layer's own code (the same bits as
mlx-lm), or the weighted sum of each token taken on arrival, which needs no memory for the k results of a token.
Knows promises and where pairs lie; knows nothing of experts or files.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from .promise import Promise
from .routes import Ints, Layout


class Results(Protocol):
    """Takes in the rows of a layout in their order, then keeps the promises made for their tokens."""

    def put(self, y: mx.array) -> None:
        """Take in y `[P, H]`, the results of the next P rows, and start their evaluation."""

    def take(self, promise: Promise, first: int, shape: tuple[int, ...]) -> mx.array:
        """Keep a promise that was made for the tokens from `first` on; `shape` is that of their indices."""


class Pairs:
    """Every result in its own row.

    Args:
        layout: of the rows to come.
        width: H.
        dtype: of the results.
    """

    def __init__(self, layout: Layout, width: int, dtype: mx.Dtype) -> None:
        self._y = mx.zeros((layout.n_rows, width), dtype=dtype)
        self._places = as_index(layout.places)
        self._done = 0

    def put(self, y: mx.array) -> None:
        self._y[self._done : self._done + y.shape[0]] = y
        self._done += y.shape[0]
        mx.async_eval(self._y)  # type: ignore[no-untyped-call]

    def take(self, promise: Promise, first: int, shape: tuple[int, ...]) -> mx.array:
        k, n = shape[-1], int(np.prod(shape))
        return promise.kept(self._y[self._places[first * k : first * k + n]].reshape(*shape, -1))


class Sums:
    """The weighted sum of each token's results, in float32: no larger than the hidden states, whatever k is.

    Added in the order the experts are computed in, not the router's, so the last bit of a float32 may differ from
    mlx-lm's. The order depends on nothing but the layout, so that a run can be repeated exactly.

    Args:
        layout: of the rows to come.
        weights: `[N, k]` as the layer applies them.
        width: H.
    """

    def __init__(self, layout: Layout, weights: mx.array, width: int) -> None:
        n, self._k = weights.shape
        self._layout, self._done = layout, 0
        self._weights = weights.astype(mx.float32).reshape(-1)
        self._sum = mx.zeros((n, width), dtype=mx.float32)

    def put(self, y: mx.array) -> None:
        rows = np.arange(self._done, self._done + y.shape[0])
        self._done += y.shape[0]
        pairs = self._layout.pairs[rows]
        own = self._layout.places[pairs] == rows  # the others only fill up a tile
        rows, pairs = np.flatnonzero(own), pairs[own]
        weighted = y.astype(mx.float32)
        tokens = pairs // self._k
        for turn in occurrences(tokens):  # no token twice in one scatter: the device would choose the order
            w = self._weights[as_index(pairs[turn])][:, None]
            self._sum = self._sum.at[as_index(tokens[turn])].add(weighted[as_index(rows[turn])] * w)
        mx.async_eval(self._sum)  # type: ignore[no-untyped-call]

    def take(self, promise: Promise, first: int, shape: tuple[int, ...]) -> mx.array:
        n = int(np.prod(shape[:-1]))
        return promise.kept_from_sum(self._sum[first : first + n].reshape(*shape[:-1], -1))


def occurrences(tokens: Ints) -> list[Ints]:
    """Places in `tokens`, split so that no part holds a token twice: all first occurrences, all second, ..."""
    order = np.argsort(tokens, kind="stable")
    ordered, at = tokens[order], np.arange(len(tokens))
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    nth = at - np.maximum.accumulate(np.where(begins, at, 0))
    return [order[nth == i] for i in range(int(nth.max()) + 1)]


def as_index(places: Ints) -> mx.array:
    """Places as MLX wants them for a gather."""
    return mx.array(places.astype(np.uint32))
