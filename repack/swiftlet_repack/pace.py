"""How the work of a transfer is cut up. Numbers only: no files, no threads.

Invariant: the spans of a hole follow each other from its first byte to its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TAPER = 2  # spans a stream still gets to fetch at any time: the last ones end together, and are small


@dataclass(frozen=True, slots=True)
class Pace:
    """How the work is cut up.

    `span_bytes` is one request: large enough that waiting for the first byte is small beside it. Towards the end spans
    shrink to `last_span_bytes`, so that no stream is left alone with a large one.
    `record_bytes` and `record_seconds`, whichever comes first, is what a kill can cost each stream.
    """

    streams: int = 4
    span_bytes: int = 64 << 20
    last_span_bytes: int = 16 << 20
    record_bytes: int = 4 << 20
    record_seconds: float = 1.0

    def __post_init__(self) -> None:
        if min(self.streams, self.span_bytes, self.last_span_bytes, self.record_bytes) < 1:
            raise ValueError(f"impossible pace {self}")

    def cut(self, holes: Sequence[tuple[int, int]], after: int) -> Iterator[tuple[int, int]]:
        """The spans that fetch the bytes of `holes`, in order.

        Args:
            holes: half-open intervals.
            after: bytes that will still be to fetch when these are done.
        """
        left = after + sum(stop - start for start, stop in holes)
        for start, stop in holes:
            while start < stop:
                step = max(1, min(self.span_bytes, max(self.last_span_bytes, left // (TAPER * self.streams))))
                end = min(start + step, stop)
                yield start, end
                left -= end - start
                start = end
