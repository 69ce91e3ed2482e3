"""Which expert to give up. Pure bookkeeping: no arrays, no files, no clock.

LFU with ageing and a recency tie-break: the expert with the fewest uses goes first, among equals the one used longest
ago. Uses are remembered after an expert is given up, so one that comes back resumes its count; all counts are halved
now and then, so that what an old topic needed does not stay for ever. Invariant: `residents` holds
exactly the keys that were added and not evicted, and the heap one entry of each; a protected key is never evicted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from heapq import heappop, heappush, heapreplace

# Uses after which counts are halved: 256 tokens of top-8. Replayed (bench/LOG.md, 2026-12): on routes of the demo model
# it changes nothing; where topics change, counts that are never halved fall behind by 8 points after 8,000 tokens.
HALVE_AFTER = 2048


class LFU:
    """Least frequently used, then least recently used. A use is O(1), an eviction O(log n), both amortised; no scan.

    A use leaves the key's entry in the heap behind the truth. Between halvings counts only grow, so an entry that comes
    to the top is either true, and then the least, or is put back where it belongs.

    Args:
        halve_after: uses between two halvings of all counts.

    Attributes:
        residents: who is there.
        uses: how often each key was used, resident or not.
    """

    def __init__(self, halve_after: int = HALVE_AFTER) -> None:
        self.residents: set[int] = set()
        self.uses: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []  # (uses, last use, key)
        self._now = 0
        self._halve_after = halve_after
        self._halve_at = halve_after

    def use(self, keys: Iterable[int]) -> None:
        """Record one use of each key, resident or about to be."""
        uses, last, now = self.uses, self._last, self._now
        for key in keys:
            now += 1
            uses[key] = uses.get(key, 0) + 1
            last[key] = now
        self._now = now
        if now >= self._halve_at:
            self._halve_at = now + self._halve_after
            self.uses = {key: n // 2 for key, n in uses.items()}
            self._heap = sorted(map(self._entry, self.residents))  # a sorted list is a heap

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

    def mend(self, residents: Iterable[int]) -> None:
        """Take these for the residents, after a call that may have been broken off at any line."""
        self.residents = set(residents)
        self._heap = sorted(map(self._entry, self.residents))

    def _entry(self, key: int) -> tuple[int, int, int]:
        return self.uses.get(key, 0), self._last.get(key, 0), key
