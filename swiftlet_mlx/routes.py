"""Which experts a stretch of tokens chose: the order to compute them in, where their rows lie, what the tail needs.

Pure bookkeeping on NumPy integers: no MLX, no files, no clock. A pair is one (token, choice); its position is
token x k + choice, where its result belongs. Invariant: a layout holds each pair of its experts exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """The pairs of a layer laid out for products: expert by expert, each in tiles of equal height.

    The last tile of an expert is filled up with its first pair, whose result is then there more than once.
    """

    experts: list[int]
    """In the order they lie."""
    height: int
    """Rows of a tile."""
    starts: Ints
    """`[experts + 1]` the row at which each begins; the last is R, the number of rows."""
    pairs: Ints
    """`[R]` the position of the pair in each row."""
    places: Ints
    """`[N x k]` the row of each pair."""

    @property
    def n_rows(self) -> int:
        return int(self.starts[-1])

    @property
    def tiles(self) -> Ints:
        """`[R / height]` which of `experts`, by its place there, each tile belongs to."""
        return np.repeat(np.arange(len(self.experts)), np.diff(self.starts) // self.height)


class Routes:
    """The router's choices for N tokens.

    Args:
        chosen: `[N, k]` expert numbers.
        n_experts: experts of the layer.

    Raises:
        ValueError: an expert number is outside the layer.
    """

    def __init__(self, chosen: NDArray[np.integer], n_experts: int) -> None:
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < n_experts:
            raise ValueError(
                f"the router chose experts {chosen.min()}..{chosen.max()} of a layer that has {n_experts}."
            )
        self.n_tokens, self.k = chosen.shape
        self.n_experts = n_experts
        self._chosen = chosen
        self._counts = np.bincount(chosen.reshape(-1), minlength=n_experts)

    @property
    def n_pairs(self) -> int:
        return int(self._chosen.size)

    @property
    def experts(self) -> list[int]:
        """Every expert that was chosen at least once, in ascending order, which is the order on disk."""
        return [int(e) for e in np.flatnonzero(self._counts)]

    def hottest(self, tail_tokens: int) -> list[int]:
        """The experts of the last tokens, most often chosen first; of equals, the one chosen later."""
        last = self._chosen[-tail_tokens:].reshape(-1)
        counts = np.bincount(last, minlength=self.n_experts)
        latest = np.zeros(self.n_experts, dtype=np.int64)
        latest[last] = np.arange(last.size)  # the last assignment stands
        used = np.flatnonzero(counts)
        return [int(e) for e in used[np.lexsort((-latest[used], -counts[used]))]]

    def lay_out(self, experts: Sequence[int], height: int) -> Layout:
        """Lay all pairs out.

        Args:
            experts: every one of `self.experts`, in the order they are to be computed.
            height: rows of a tile.
        """
        order = np.array(experts, dtype=np.int64)
        rank = np.zeros(self.n_experts, dtype=np.uint16)  # 16 bits: a radix sort
        rank[order] = np.arange(len(order))
        by_rank = np.argsort(rank[self._chosen.reshape(-1)], kind="stable")  # pairs in the order they are computed
        counts = self._counts[order]
        firsts = np.cumsum(counts) - counts
        heights = -(-counts // height) * height
        starts = np.concatenate([[0], np.cumsum(heights)])
        rows = np.arange(self.n_pairs) + np.repeat(starts[:-1] - firsts, counts)  # where each of `by_rank` lies
        pairs = np.repeat(by_rank[firsts], heights)
        pairs[rows] = by_rank
        places = np.empty_like(rows)
        places[by_rank] = rows
        return Layout(list(experts), height, starts, pairs, places)


def groups(experts: Sequence[int], size: int) -> list[list[int]]:
    """Cut a list of experts into runs of nearly equal length, at most `size` each, in the same order."""
    if not experts:
        return []
    n = -(-len(experts) // size)
    cuts = [len(experts) * i // n for i in range(n + 1)]
    return [list(experts[a:b]) for a, b in pairwise(cuts)]
