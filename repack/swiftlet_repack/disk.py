"""What a disk is asked to keep through a power cut, and what it says when it will not, in words a user can act on.

Knows descriptors, paths and error numbers; not what is written. Invariant: no OSError leaves `in_words`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftlet_mlx.errors import DiskFull, InstallError

FULL = (errno.ENOSPC, errno.EDQUOT)


def sync_folder(folder: Path) -> None:
    """Make names created in or renamed into a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """What the system says about a file or a folder, as an error a user can act on.

    Raises:
        DiskFull, InstallError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"{path}: no space left. Make room and repeat the same command") from None
        where = error.filename or path
        hint = "choose another --output" if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM) else "see the disk"
        raise InstallError(f"{where}: {error.strerror or error}; {hint}") from None
