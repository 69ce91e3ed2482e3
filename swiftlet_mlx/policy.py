"""Which expert to give up. Pure bookkeeping: no arrays, no files, no clock.

LFU with a recency tie-break: the expert with the fewest uses goes first, among equals the one used longest ago. Uses
are remembered after an expert is given up, so one that comes back resumes its count. Invariant: `residents` holds
exactly the keys that were added and not evicted, and the heap one entry of each; a protected key is never evicted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from heapq import heappop, heappush, heapreplace


class LFU:
    """Least frequently used, then least recently used. A use is O(1), an eviction amortised O(log n); no scan.

    A use leaves the key's entry in the heap behind the truth. Counts only grow, so an entry that comes to the top is
    either true, and then the least, or is put back where it belongs.

    Attributes:
        residents: who is there.
        uses: how often each key was used, resident or not.
    """

    def __init__(self) -> None:
        self.residents: set[int] = set()
        self.uses: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []  # (uses, last use, key)
        self._now = 0

    def use(self, keys: Iterable[int]) -> None:
        """Record one use of each key, resident or about to be."""
        uses, last, now = self.uses, self._last, self._now
        for key in keys:
            now += 1
            uses[key] = uses.get(key, 0) + 1
            last[key] = now
        self._now = now

    def add(self, key: int) -> None:
        """A key has become resident."""
        if key not in self.residents:
            self.residents.add(key)
            heappush(self._heap, self._entry(key))

    def evict(self, protected: Container[int] = ()) -> int:
        """Give one resident up and return it. Its count is kept.

        Raises:
            LookupError: if every resident is protected.
        """
        heap, held = self._heap, []
        try:
            while heap:
                key = heap[0][2]
                true = self._entry(key)
                if heap[0] != true:
                    heapreplace(heap, true)
                elif key in protected:
                    held.append(heappop(heap))
                else:
                    heappop(heap)
                    self.residents.remove(key)
                    return key
            raise LookupError("every resident is protected")
        finally:
            for entry in held:
                heappush(heap, entry)

    def _entry(self, key: int) -> tuple[int, int, int]:
        return self.uses.get(key, 0), self._last.get(key, 0), key
