"""Where the bytes of a source file belong on disk, and putting them there and reading them back.

Knows byte offsets and files; not tensors, not where bytes come from. Invariant: a `Route` covers its source
file from the first byte to the last without gap or overlap, so writing a file through it and reading it back
through it gives the same bytes in the same order, wherever in between they lie.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swiftlet_mlx.errors import DiskFull, RepackError
from swiftlet_mlx.qpack import safe_relative
from swiftlet_mlx.whole import sync

from .disk import FULL

STATE = ".install"  # folder inside the staging folder for what is not part of the result; gone when it is finished
MAX_READ_BYTES = 1 << 20  # large enough for full disk speed, small enough to hash from a cache


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` runs of `size` bytes: back to back in the source from `start`, `stride` apart in `target` from
    `offset`."""

    start: int
    size: int
    target: str
    offset: int = 0
    count: int = 1
    stride: int = 0

    def __post_init__(self) -> None:
        if min(self.start, self.size, self.offset, self.stride) < 0 or self.count < 1:
            raise ValueError(f"impossible segment: {self}")
        if self.count > 1 and self.stride < self.size:
            raise ValueError(f"runs of {self.size} bytes overlap at stride {self.stride}: {self}")
        safe_relative(self.target, "a plan")

    @property
    def stop(self) -> int:
        return self.start + self.size * self.count


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are contiguous both in the source and in one target file."""

    target: str
    offset: int
    length: int


class Route:
    """The segments of one source file of `size` bytes.

    Raises:
        ValueError: if the segments leave a gap, overlap, or do not end at `size`.
    """

    def __init__(self, size: int, segments: Iterable[Segment]) -> None:
        self.size = size
        self.segments = sorted((s for s in segments if s.stop > s.start), key=lambda s: s.start)
        self._starts = [segment.start for segment in self.segments]
        at = 0
        for segment in self.segments:
            if segment.start != at:
                raise ValueError(f"source bytes {at} to {segment.start} are covered twice or not at all")
            at = segment.stop
        if at != size:
            raise ValueError(f"segments end at byte {at} of {size}")

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of source bytes `[start, stop)`, in source order."""
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            segment = self.segments[at]
            at += 1
            end = min(stop, segment.stop)
            while start < end:
                run, inside = divmod(start - segment.start, segment.size)
                length = min(segment.size - inside, end - start)
                yield Piece(segment.target, segment.offset + run * segment.stride + inside, length)
                start += length

    def targets(self) -> set[str]:
        """Relative paths of the files this source file contributes to."""
        return {segment.target for segment in self.segments}


class Places:
    """Files under one folder, created at their final sizes and kept open, written and read at offsets.

    Args:
        root: folder that holds them; it must exist.
        sizes: final size in bytes by relative path. A file not named here grows as it is written.
        read_only: files are opened for reading only, and none is created.
    """

    def __init__(self, root: Path, sizes: Mapping[str, int] | None = None, *, read_only: bool = False) -> None:
        self.root, self.sizes = root, dict(sizes or {})
        self._flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file. Later writes are refused."""
        with self._lock:
            self._closed = True
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def path(self, target: str) -> Path:
        """Where a relative path lies."""
        return self.root / safe_relative(target, str(self.root))

    def create(self) -> None:
        """Create every file of `sizes` that is not there yet, so that empty ones exist too.

        Raises:
            DiskFull, RepackError: whatever the system refuses.
        """
        for target in self.sizes:
            try:
                self._fd(target)
            except OSError as error:
                raise self.refusal(error, target) from None

    def write(self, route: Route, at: int, data: bytes) -> None:
        """Put source bytes `[at, at + len(data))` where they belong.

        Raises:
            DiskFull: if the file system has no room.
            RepackError: for any other refusal of the system.
        """
        view = memoryview(data)
        for piece in route.pieces(at, at + len(view)):
            try:
                _pwrite_all(self._fd(piece.target), view[: piece.length], piece.offset)
            except OSError as error:
                raise self.refusal(error, piece.target) from None
            view = view[piece.length :]

    def blocks(self, route: Route, start: int, stop: int, buffer: memoryview) -> Iterator[memoryview]:
        """Read source bytes `[start, stop)` back from where they belong, in order, a full buffer at a time.

        What lies beyond the end of a file that is being written is the hole it would be: zeros. (No hash fits them, so
        what was lost on the disk is fetched again.)

        Args:
            buffer: every block is a view of it, so each is valid only until the next is asked for.

        Raises:
            RepackError: if a file cannot be read, or one that is only read ends too early.
        """
        filled = 0
        for piece in route.pieces(start, stop):
            offset, left = piece.offset, piece.length
            while left:
                room = buffer[filled : filled + left]
                try:
                    count = os.preadv(self._fd(piece.target), [room], offset)
                except OSError as error:
                    raise self.refusal(error, piece.target) from None
                if not count and self._flags == os.O_RDONLY:
                    raise RepackError(f"{self.path(piece.target)}: ends at byte {offset}, {left} more were expected")
                if not count:
                    count = len(room)
                    room[:] = bytes(count)
                filled, offset, left = filled + count, offset + count, left - count
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]

    def read(self, route: Route, start: int, stop: int) -> Iterator[bytes]:
        """The same in blocks that may be kept."""
        buffer = memoryview(bytearray(max(1, min(stop - start, MAX_READ_BYTES))))
        yield from map(bytes, self.blocks(route, start, stop, buffer))

    def sync(self, targets: Iterable[str]) -> None:
        """Make what was written to these files survive a power cut.

        Raises:
            DiskFull: if the file system finds out only now that it has no room.
        """
        for target in targets:
            try:
                sync(self._fd(target))
            except OSError as error:
                raise self.refusal(error, target) from None

    def refusal(self, error: OSError, target: str) -> RepackError | DiskFull:
        """The error a user should read for what the system said about one file."""
        if error.errno in FULL:
            return DiskFull(
                f"{self.root}: no space left while writing {target}. Make room and repeat the same command; "
                "it continues where it stopped"
            )
        return RepackError(f"{self.root / target}: {error.strerror or error}")

    def _fd(self, target: str) -> int:
        fd = self._fds.get(target)
        if fd is not None:
            return fd
        with self._lock:
            if self._closed:
                raise RepackError(f"{self.root}: already closed")
            if target not in self._fds:
                path = self.path(target)
                if self._flags & os.O_CREAT:
                    path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, self._flags | os.O_CLOEXEC, 0o644)
                self._fds[target] = fd
                size = self.sizes.get(target)
                if size is not None and os.fstat(fd).st_size != size:
                    os.ftruncate(fd, size)  # sparse: only written bytes take space, and padding reads as zeros
            return self._fds[target]


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
