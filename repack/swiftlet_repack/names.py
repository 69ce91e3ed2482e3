"""Whether one folder can hold files of certain names, on any file system it may lie on or be copied to.

Knows names only. Invariant: names that pass stay apart where letter case and the form of accents do not count (macOS),
where a name's last dots and spaces are dropped (exFAT, network shares), and beside the installer's own files.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

from swiftlet_mlx.errors import UnsafePath
from swiftlet_mlx.library import ORIGIN
from swiftlet_mlx.qpack import HASHES

from .places import STATE

MAX_PART_BYTES = 255  # of one component, on every file system in use
_WRITTEN = (HASHES, ORIGIN)  # what the installer writes into a container when the source has none


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that could not lie side by side, or not beside what the installer writes.

    Args:
        names: relative paths that `safe_relative` has let pass.
        where: what to blame.

    Raises:
        UnsafePath: naming the path.
    """
    ours = {folded(name): name for name in _WRITTEN}
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        plain = folded(name)
        other = seen.get(plain) or (ours[plain] if ours.get(plain, name) != name else "")
        if not other and plain.split("/")[0] == folded(STATE):
            other = STATE
        if other:
            raise UnsafePath(f"{where}: the path {name!r} cannot be used beside {other!r}")
        for part in name.split("/"):
            if part.endswith((".", " ")) or len(part.encode()) > MAX_PART_BYTES:
                raise UnsafePath(f"{where}: the path {name!r} has a part that not every file system can hold")
        seen[plain] = name
        for parent in list(PurePosixPath(plain).parents)[:-1]:
            folders.setdefault(str(parent), name)
    for plain, name in seen.items():
        if plain in folders:
            raise UnsafePath(f"{where}: {name!r} would be a file and a folder")


def folded(name: str) -> str:
    """What a file system compares that ignores letter case and the form of accents (Unicode's canonical caseless
    matching)."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())
