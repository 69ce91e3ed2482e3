"""Find which bytes of a file arrived or lie wrong, and put the right ones in their place.

Knows a delivery, a fetcher and the places; not why the file is suspected. A hash says that a file is wrong, not where,
so the pieces before the wrong one travel again; but nothing is written except the bytes that differ, and nothing after
the last wrong piece is fetched. Invariant: what is given back is the hash of the bytes as they lie on disk afterwards,
and it is the one the source announces.
"""

from __future__ import annotations

from collections.abc import Callable

from swiftlet_mlx.errors import HashMismatch

from .delivery import Delivery, Repair
from .fetch import Fetcher
from .hashing import FileHashes
from .places import Places

REPAIR_BYTES = 16 << 20  # how much is compared before the file is hashed again in the hope that this was all


def mend(delivery: Delivery, fetcher: Fetcher, places: Places, on_repair: Callable[[Repair], None]) -> FileHashes:
    """Fetch a file again piece by piece, compare with what is on disk, rewrite what differs, until the hash fits.

    Args:
        delivery: the file.
        fetcher, places: where from, where to.
        on_repair: told about each piece that was wrong, after it was put right and flushed.

    Raises:
        HashMismatch: if the bytes that the source sends now do not have its hash either.
        SwiftletError: as fetching and writing do.
    """
    file, repairs = delivery.file, list[Repair]()
    right = FileHashes(file.size, sha256=file.sha256, git_oid=file.git_oid)
    for start in range(0, file.size, REPAIR_BYTES):
        stop = min(start + REPAIR_BYTES, file.size)
        again = fetcher.read(file, start, stop)
        right.update(again)
        wrong = _rewrite(delivery, places, start, again)
        if wrong is None:
            continue
        repairs.append(wrong)
        on_repair(wrong)
        if len(repairs) & (len(repairs) - 1) == 0:  # after 1, 2, 4, ... repairs: is the rest right as it is?
            whole = right.copy()
            for block in places.read(delivery.route, stop, file.size):
                whole.update(block)
            if whole.fit():
                return whole
    if right.fit():
        return right
    where = ", ".join(f"{r.start}-{r.stop - 1}" for r in repairs)
    raise HashMismatch(
        f"{file.name}: the bytes that the source sends do not have the hash it announces "
        f"({file.sha256 or file.git_oid})"
        + (f"; bytes {where} differed when fetched again" if where else "; the same bytes came twice")
        + ". The file at the source is damaged: try another source, or the same command later"
    )


def _rewrite(delivery: Delivery, places: Places, start: int, right: bytes) -> Repair | None:
    """Replace what differs on disk from `right`; the bounds of the difference, or None."""
    here = b"".join(places.read(delivery.route, start, start + len(right)))
    if here == right:
        return None
    first = _common(lambda n: here[:n] == right[:n], len(here))
    last = len(here) - _common(lambda n: here[len(here) - n :] == right[len(here) - n :], len(here))
    places.write(delivery.route, start + first, right[first:last])
    places.sync({piece.target for piece in delivery.route.pieces(start + first, start + last)})
    return Repair(delivery.file.name, start + first, start + last)


def _common(equal: Callable[[int], bool], size: int) -> int:
    """The largest n up to `size` for which `equal(n)` holds, given that it holds up to some n and then no
    more."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if equal(middle) else (low, middle - 1)
    return low
