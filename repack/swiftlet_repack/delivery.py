"""A remote file, where its bytes belong, and which of them had to be fetched again.

Knows nothing of how bytes travel. Invariant: a delivery's route covers exactly the file's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .origin import RemoteFile
from .places import Route, Segment


@dataclass(frozen=True, slots=True)
class Delivery:
    """One remote file and where its bytes belong.

    Args:
        file: the file.
        route: where they belong.
        passing_bytes: how many of them are needed only until the file is verified, and then given back.
    """

    file: RemoteFile
    route: Route
    passing_bytes: int = 0

    def __post_init__(self) -> None:
        if self.route.size != self.file.size:
            raise ValueError(f"{self.file.name} has {self.file.size} bytes, its route {self.route.size}")


@dataclass(frozen=True, slots=True)
class Repair:
    """Bytes `[start, stop)` of a source file that had arrived wrong and were fetched again."""

    file: str
    start: int
    stop: int


def whole(file: RemoteFile, target: str | None = None) -> Delivery:
    """A file that is kept as it is, under its own name if no other is given."""
    return Delivery(file, Route(file.size, [Segment(0, file.size, target or file.name)]))
