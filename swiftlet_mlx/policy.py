"""Which expert to give up. Pure bookkeeping: no arrays, no files, no clock.

LFU with a recency tie-break: the expert with the fewest uses goes first, among equals the one used longest ago. Uses
are remembered after an expert is given up, so one that comes back resumes its count. Invariant: `residents` holds
exactly the keys that were added and not removed; `victim` returns one of them, never a protected one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from heapq import heapify, heappop, heappush


class LFU:
    """Least frequently used, then least recently used. Amortised O(log n) a use and a victim; no scan over residents.

    The heap may hold outdated entries of a key; the newest one, equal to `(uses[key], last[key])`, counts.
    """

    def __init__(self) -> None:
        self.residents: set[int] = set()
        self._uses: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []  # (uses, last use, key)
        self._now = 0

    def use(self, keys: Iterable[int]) -> None:
        """Record one use of each key, resident or about to be."""
        for key in keys:
            self._now += 1
            self._uses[key] = self._uses.get(key, 0) + 1
            self._last[key] = self._now
            if key in self.residents:
                self._push(key)

    def add(self, key: int) -> None:
        """A key has become resident."""
        self.residents.add(key)
        self._uses.setdefault(key, 0)
        self._last.setdefault(key, 0)
        self._push(key)

    def remove(self, key: int) -> None:
        """A key is no longer resident. Its count is kept."""
        self.residents.discard(key)

    def victim(self, protected: Container[int]) -> int:
        """The resident to give up next. It stays resident until `remove`.

        Raises:
            LookupError: if every resident is protected.
        """
        held: list[tuple[int, int, int]] = []
        try:
            while self._heap:
                entry = self._heap[0]
                uses, last, key = entry
                if key not in self.residents or (uses, last) != (self._uses[key], self._last[key]):
                    heappop(self._heap)
                elif key in protected:
                    held.append(heappop(self._heap))
                else:
                    return key
            raise LookupError("every resident is protected")
        finally:
            for entry in held:
                heappush(self._heap, entry)

    def _push(self, key: int) -> None:
        heappush(self._heap, (self._uses[key], self._last[key], key))
        if len(self._heap) > 64 + 8 * len(self.residents):
            self._heap = [(self._uses[k], self._last[k], k) for k in self.residents]
            heapify(self._heap)
