"""Where a conversation can be taken up again: cached token timelines with checkpoints, within a byte budget.

Knows caches and token ids, no text and no threads (the engine thread alone touches it).

A recurrent state (Gated DeltaNet, convolution, rotating window) cannot be cut back, a key-value cache can. So
a Timeline is the tokens that were fed, the live caches, and Checkpoints: at an offset, a copy of every state
that cannot be cut. Going back to an offset is cutting the key-value caches there and putting the copies back.

Invariants: `timeline.ids` are exactly the tokens the caches have seen. A key-value cache below a checkpoint's
offset is never written again while the checkpoint exists. A timeline is found by token ids alone, so nothing
of one conversation reaches another that does not begin with the same tokens.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache

CUTTABLE = (KVCache, QuantizedKVCache)
"""Caches whose past is the first `offset` positions of their arrays. (A RotatingKVCache says it can be
trimmed until its window is full; a state that can be cut only sometimes is copied like one that never
can.)"""

Cache = Any
"""One layer's cache, as mlx-lm's make_prompt_cache makes them."""


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """At `offset` tokens: per layer a copy of the state, or None where the key-value cache is simply cut."""

    offset: int
    states: tuple[Any, ...] = field(compare=False)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays this checkpoint keeps alive."""
        return _arrays(self.states)


class Timeline:
    """Tokens fed so far and the caches that saw them."""

    def __init__(self, caches: Iterable[Cache]) -> None:
        self.caches: list[Cache] = list(caches)
        self.checkpoints: list[Checkpoint] = []
        self.turn = 0
        """Offset of the last turn's prompt. Going back no further loses only the reply to it."""
        self._ids = np.zeros(256, dtype=np.int64)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def ids(self) -> list[int]:
        """The tokens the caches have seen."""
        return cast("list[int]", self._ids[: self._n].tolist())

    @property
    def cuttable(self) -> bool:
        """True if every offset can be gone back to."""
        return all(type(c) in CUTTABLE for c in self.caches)

    def fed(self, ids: Sequence[int]) -> None:
        """Note that the caches have just seen these tokens."""
        need = self._n + len(ids)
        if need > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(need, dtype=np.int64)])
        self._ids[self._n : need] = ids
        self._n = need

    def common(self, ids: np.ndarray) -> int:
        """How many tokens this timeline and ids share from the start."""
        n = min(self._n, len(ids))
        different = np.flatnonzero(self._ids[:n] != ids[:n])
        return int(different[0]) if len(different) else n

    def reachable(self, offset: int) -> int:
        """The last offset, not beyond `offset`, at which this timeline can be taken up."""
        if offset >= self._n:
            return self._n
        if self.cuttable:
            return offset
        i = bisect_right(self.checkpoints, offset, key=lambda c: c.offset)
        return self.checkpoints[i - 1].offset if i else 0

    def checkpoint(self) -> None:
        """Make the present offset one that can be gone back to. Copies references to immutable arrays."""
        if self._n == 0 or any(c.offset == self._n for c in self.checkpoints):
            return
        states = tuple(None if type(c) in CUTTABLE else _copied(c.state) for c in self.caches)
        found = list(_arrays(states))
        if found:
            mx.eval(found)  # else the checkpoint would hold the graph, and with it everything that fed it
        insort(self.checkpoints, Checkpoint(self._n, states))

    def rewind(self, offset: int, *, uneven: bool = False) -> None:
        """Go back to a reachable offset; the tokens and checkpoints after it are forgotten.

        Args:
            offset: a value that `reachable` has returned.
            uneven: the layers may have advanced differently beyond `offset` (a pass was broken off): put
                every one of them back, whatever `ids` says.
        """
        if offset == self._n and not uneven:
            return
        mark = next((c for c in self.checkpoints if c.offset == offset), None)
        if mark is None and not self.cuttable:
            raise ValueError(f"offset {offset} is not a checkpoint of this timeline")
        for i, cache in enumerate(self.caches):
            if type(cache) in CUTTABLE:
                cache.trim(cache.offset - offset)
            elif mark is not None:
                self.caches[i] = type(cache).from_state(_copied(mark.states[i]))
        self._n = offset
        self.checkpoints = [c for c in self.checkpoints if c.offset <= offset]

    def restart(self, caches: Iterable[Cache]) -> None:
        """Forget everything and begin again with empty caches."""
        self.caches, self.checkpoints, self._n = list(caches), [], 0

    def fork(self, offset: int) -> Timeline:
        """A second timeline with the first `offset` tokens of this one, which at most gains a checkpoint at its end."""
        if offset == self._n:
            self.checkpoint()
        mark = next((c for c in self.checkpoints if c.offset == offset), None)
        if mark is None and not self.cuttable:
            raise ValueError(f"offset {offset} is not a checkpoint of this timeline")
        states = mark.states if mark else (None,) * len(self.caches)
        other = Timeline(
            _cut_copy(cache, offset) if state is None else type(cache).from_state(_copied(state))
            for cache, state in zip(self.caches, states, strict=True)
        )
        other.fed(self.ids[:offset])
        other.checkpoints = [c for c in self.checkpoints if c.offset <= offset]
        other.evaluate()  # else the copy would hold the whole of this timeline's arrays
        return other

    def evaluate(self) -> None:
        """Compute what is still pending, so that nothing lazy is left behind when the reply is over."""
        found = list(self.arrays())
        if found:
            mx.eval(found)

    def arrays(self) -> Iterator[mx.array]:
        """Every array this timeline keeps alive; shared ones may come more than once."""
        yield from _arrays([c.state for c in self.caches])
        for mark in self.checkpoints:
            yield from mark.arrays()


class PrefixStore:
    """Timelines of past requests, found by what their tokens begin with. Least recently used ones are
    dropped.

    Args:
        budget_bytes: what the arrays of all timelines may take together; 0 keeps nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._timelines: list[Timeline] = []  # least recently used first

    def __len__(self) -> int:
        return len(self._timelines)

    def take(self, ids: Sequence[int]) -> Timeline | None:
        """The timeline that spares the most reading of `ids`, rewound to where they part; None if none does.

        At least the last token of `ids` is left to be fed, for its logits are needed. A timeline whose
        earlier turns would be lost by this is forked and stays in the store; otherwise it leaves the store
        until put back.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        best, at = None, 0
        for timeline in reversed(self._timelines):
            offset = timeline.reachable(min(timeline.common(wanted), len(ids) - 1))
            if offset > at:
                best, at = timeline, offset
        if best is None:
            return None
        if at < min(best.turn, len(best)):
            self._timelines.remove(best)
            self._timelines.append(best)
            return best.fork(at)
        self._timelines.remove(best)
        best.checkpoint() if at == len(best) else best.rewind(at)
        return best

    def find(self, ids: Sequence[int]) -> Timeline | None:
        """The timeline that covers most of `ids`, left in the store and not rewound."""
        wanted = np.asarray(ids, dtype=np.int64)
        return max(self._timelines, key=lambda t: t.reachable(t.common(wanted)), default=None)

    def copy(self, ids: Sequence[int]) -> Timeline | None:
        """A timeline of its own with as much of `ids` as one in the store covers; None if none does."""
        found = self.find(ids)
        offset = found.reachable(found.common(np.asarray(ids, dtype=np.int64))) if found is not None else 0
        if found is None or offset == 0:
            return None
        copy = found.fork(offset)
        copy.turn = min(found.turn, offset)
        return copy

    def unread(self, ids: Sequence[int]) -> int:
        """How many of `ids` no timeline spares anybody to read."""
        wanted = np.asarray(ids, dtype=np.int64)
        return len(ids) - max((t.reachable(t.common(wanted)) for t in self._timelines), default=0)

    def put(self, timeline: Timeline) -> bool:
        """Keep a timeline as the most recently used one, then drop what the budget does not hold.

        Returns:
            False if that was the timeline itself.
        """
        if len(timeline) and self.budget_bytes > 0:
            self._timelines = [t for t in self._timelines if not _covers(timeline, t)]
            self._timelines.append(timeline)
            self.shrink()
        return any(t is timeline for t in self._timelines)

    def shrink(self, budget_bytes: int | None = None) -> None:
        """Drop the oldest until the budget holds: other timelines first, then checkpoints of the last one.

        The first checkpoint of a timeline (after the system prompt) and its last one outlive those between.
        """
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        while self._timelines and self.nbytes > budget:
            last = self._timelines[-1]
            if len(self._timelines) > 1:
                self._timelines.pop(0)
            elif len(last.checkpoints) > 2:
                last.checkpoints.pop(1)
            elif last.checkpoints and any(True for c in last.checkpoints for _ in c.arrays()):
                last.checkpoints.pop(0)
            else:
                self._timelines.pop()

    def clear(self) -> None:
        """Drop everything."""
        self._timelines.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held by all timelines; an array that several share counts once."""
        return sum({id(a): a.nbytes for t in self._timelines for a in t.arrays()}.values())


def _covers(longer: Timeline, shorter: Timeline) -> bool:
    """True if everything `shorter` can be taken up at, `longer` can too."""
    if longer is shorter:
        return True
    ids = np.asarray(shorter.ids, dtype=np.int64)
    if longer.common(ids) < len(ids):
        return False
    offsets = {c.offset for c in longer.checkpoints} | {len(longer)}
    return longer.cuttable or {c.offset for c in shorter.checkpoints} | {len(shorter)} <= offsets


def _copied(state: Any) -> Any:
    """The same state in new array objects, each without the larger buffer it may be a slice of.

    mlx arrays are immutable, but `a[i:j] = b` changes what the Python object `a` stands for: a copy must not
    share the object. `mx.contiguous` copies bytes only where the buffer is larger than the array.
    """
    return tree_map(lambda a: mx.contiguous(a) if isinstance(a, mx.array) else a, state)


def _cut_copy(cache: Cache, offset: int) -> Cache:
    cut = tree_map(lambda a: mx.contiguous(a[..., :offset, :]) if isinstance(a, mx.array) else a, cache.state[:2])
    return type(cache).from_state((*cut, offset, *cache.state[3:]))


def _arrays(tree: Any) -> Iterator[mx.array]:
    for _, leaf in cast("list[tuple[str, Any]]", tree_flatten(tree)):
        if isinstance(leaf, mx.array):
            yield leaf
