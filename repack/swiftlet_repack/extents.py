"""Which bytes of a file are done: a set of half-open intervals. Pure bookkeeping: no files, no locks.

Invariant: the intervals are sorted, not empty, and neither touch nor overlap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Extents:
    """A growing set of byte intervals `[start, stop)`."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes in the set."""
        return sum(self._stops) - sum(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add `[start, stop)`; parts that are already there do not matter.

        Raises:
            ValueError: if `start` is negative or after `stop`.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"not an interval: [{start}, {stop})")
        if start == stop:
            return
        first = bisect_left(self._stops, start)  # the first that ends at or after start: touches or follows
        last = bisect_right(self._starts, stop)  # one past the last that begins at or before stop
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def covered_to(self, start: int) -> int:
        """The end of the unbroken run of done bytes from `start`; `start` itself if it is not done."""
        at = bisect_right(self._starts, start) - 1
        return self._stops[at] if at >= 0 and self._stops[at] > start else start

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The intervals of `[start, stop)` that are not in the set, in order."""
        for begin, end in self:
            if end <= start:
                continue
            if begin >= stop:
                break
            if begin > start:
                yield start, begin
            start = end
        if start < stop:
            yield start, stop
