"""Which source a command means: a hub repository or a web folder, behind one interface.

Knows the two kinds of origin and what tells a ready container from a checkpoint; fetches nothing but lists.
Invariant: `name` is the same for the same source in every run, shows no password, and is what the journal
compares.
"""

from __future__ import annotations

from typing import Protocol

from swiftlet_mlx.qpack import LAYOUT, MANIFEST

from .fetch import Fetcher
from .hub import Hub, Listing
from .mirror import Mirror
from .origin import Origin


class Source(Origin, Protocol):
    """An origin that can list its files."""

    @property
    def name(self) -> str:
        """`ORG/NAME`, or the web folder's address without a password."""

    @property
    def revision(self) -> str | None:
        """What was asked for: a branch, tag or commit of a hub; None is its default."""

    def listing(self, fetcher: Fetcher, *, commit: str | None = None) -> Listing:
        """Its files; of `commit` where the source has commits."""


def is_ready_container(listing: Listing) -> bool:
    """Whether a source holds a container rather than a checkpoint."""
    return MANIFEST in listing.files and LAYOUT in listing.files


def folder_name(source: str) -> str:
    """What to call a container made from a source: the last part of its name, without a `-qpack` of its
    own."""
    name = source.rstrip("/").rsplit("/", 1)[-1]
    for ending in (".qpack", "-qpack", "_qpack"):
        name = name.removesuffix(ending)
    return f"{name or 'model'}.qpack"


__all__ = ["Hub", "Mirror", "Source", "folder_name", "is_ready_container"]
