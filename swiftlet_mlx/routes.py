"""Which experts a stretch of tokens chose: pairs sorted by expert, groups to read together, what the tail
needs.

Pure bookkeeping on NumPy integers: no MLX, no files, no clock. A pair is one (token, choice); its position is
token x k + choice, where its result belongs. Invariant: over a set of experts, the tiles cover each of
their pairs exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tile:
    """Pairs to be computed in one call, sorted by the row of their expert in the bank."""

    pairs: Ints
    """`[P]` positions."""
    rows: NDArray[np.uint32]
    """`[P]` which row of the bank holds the expert of each."""


class Routes:
    """The router's choices for N tokens.

    Args:
        chosen: `[N, k]` expert numbers.
        n_experts: experts of the layer.

    Raises:
        ValueError: an expert number is outside the layer.
    """

    def __init__(self, chosen: Ints, n_experts: int) -> None:
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < n_experts:
            raise ValueError(
                f"the router chose experts {chosen.min()}..{chosen.max()} of a layer that has {n_experts}."
            )
        self.n_tokens, self.k = chosen.shape
        self.n_experts = n_experts
        self._chosen = chosen
        flat = chosen.reshape(-1)
        self._order = np.argsort(flat.astype(np.uint16), kind="stable")  # 16 bits: a radix sort
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=n_experts))])

    @property
    def experts(self) -> list[int]:
        """Every expert that was chosen at least once, in ascending order, which is the order on disk."""
        return [int(e) for e in np.flatnonzero(np.diff(self._starts))]

    def hottest(self, tail_tokens: int) -> list[int]:
        """The experts of the last tokens, most often chosen first; of equals, the one chosen later."""
        last = self._chosen[-tail_tokens:].reshape(-1)
        counts = np.bincount(last, minlength=self.n_experts)
        latest = np.zeros(self.n_experts, dtype=np.int64)
        latest[last] = np.arange(last.size)  # the last assignment stands
        used = np.flatnonzero(counts)
        return [int(e) for e in used[np.lexsort((-latest[used], -counts[used]))]]

    def tiles(self, experts: Sequence[int], rows: Sequence[int], max_pairs: int) -> Iterator[Tile]:
        """The pairs of some experts, at most max_pairs at a time.

        Args:
            experts: expert numbers.
            rows: for each, its row in the bank that will compute it.
            max_pairs: bound on a tile, and so on the memory of one call.
        """
        by_row = sorted(zip(rows, experts, strict=True))
        pairs = [self._order[self._starts[e] : self._starts[e + 1]] for _, e in by_row]
        if not pairs:
            return
        every = np.concatenate(pairs)
        row_of = np.repeat(np.array([r for r, _ in by_row], dtype=np.uint32), [len(p) for p in pairs])
        for at in range(0, len(every), max_pairs):
            yield Tile(every[at : at + max_pairs], row_of[at : at + max_pairs])


def groups(experts: Sequence[int], size: int) -> list[list[int]]:
    """Cut a list of experts into runs of nearly equal length, at most `size` each, in the same order."""
    if not experts:
        return []
    n = -(-len(experts) // size)
    cuts = [len(experts) * i // n for i in range(n + 1)]
    return [list(experts[a:b]) for a, b in pairwise(cuts)]
