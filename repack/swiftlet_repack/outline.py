"""What an installation is about to do, in numbers, and whether the disk has room for it.

Knows sizes; reads no disk, fetches nothing. Invariant: the space that is asked for is enough at every moment of the
installation, not only at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swiftlet_mlx.errors import DiskFull
from swiftlet_mlx.units import size

from .delivery import Delivery


@dataclass(frozen=True, slots=True)
class Outline:
    """What is about to happen, before anything large is fetched. Sizes are bytes."""

    source: str
    commit: str | None
    output: Path
    ready: bool  # a container that is copied; otherwise a checkpoint that is repacked on the way
    resumed: bool
    download_bytes: int  # in all
    missing_bytes: int  # of these, still to come
    output_bytes: int
    needed_bytes: int  # disk space still to be taken
    free_bytes: int
    dense_bytes: int
    token_bytes: int  # experts that one token reads: with less cache than that, speed suffers
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]


def check_room(outline: Outline) -> None:
    """Refuse to begin what cannot end.

    Raises:
        DiskFull: naming what is needed and what is free.
    """
    if outline.free_bytes < outline.needed_bytes:
        raise DiskFull(
            f"{outline.output.parent}: {size(outline.needed_bytes)} are needed there, "
            f"{size(outline.free_bytes)} are free. Make room, or choose another --output"
        )


def beyond_bytes(deliveries: Iterable[Delivery]) -> int:
    """How much more than the finished container lies on the disk at the worst moment.

    What is left out of a shard is kept until the shard is verified: without it, an interrupted run would have to fetch
    it again for the shard's hash. It takes the place of shards that are still to come (a transfer sees to that); only
    what finds no such place is taken beyond.
    """
    every = list(deliveries)
    others = sum(d.file.size for d in every if not d.passing_bytes)
    return max(0, sum(d.passing_bytes for d in every) - others)
