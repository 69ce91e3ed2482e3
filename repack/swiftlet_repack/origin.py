"""What a source says about itself: its files as announced, and who speaks for it.

Knows names, sizes, hashes and addresses; fetches nothing. Invariant: a `RemoteFile` is what was announced and is never
changed; what is seen later is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from swiftlet_mlx.errors import SwiftletError


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a source, as announced: its size, and whichever of its hashes and validators are known."""

    name: str
    url: str
    size: int
    sha256: str | None = None
    git_oid: str | None = None
    etag: str | None = None


def shown(url: str) -> str:
    """An address as it may be written into a message or a log: without user, password and signature."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that is none"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Origin(Protocol):
    """Where files come from: who may be told the token, and what a refusal means in words."""

    @property
    def home(self) -> str:
        """Any URL of the one origin that credentials are for."""

    def credentials(self) -> Mapping[str, str]:
        """Headers for `home` only."""

    def refusal(self, status: int, headers: Mapping[str, str], file: str) -> SwiftletError:
        """The error for an answer that will not get better by asking again."""
