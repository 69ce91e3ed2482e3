"""Files that appear under their name only when they are whole: written beside it, flushed, renamed.

Knows paths and the system; not what is inside. Invariant: whatever happens, power cuts included, the name stands for
the old contents or for the new ones, and nothing half written is left when an exception passes through.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path, suffix: str = "") -> Iterator[Path]:
    """A name to write to; it becomes `path` when the block ends well.

    Args:
        path: what to replace; its folder must exist.
        suffix: what the name to write to ends with, for writers that look at it.

    Raises:
        OSError: the folder cannot be written to.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)  # the name itself


def flush(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """The same of an open file."""
    os.fsync(descriptor)
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves it in the drive's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
