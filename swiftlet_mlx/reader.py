"""Where expert bytes come from: a container or an ordinary MLX checkpoint, read straight into the caller's buffers.

Knows files, offsets and buffers; knows nothing of arrays, slots or mlx. Any number of threads may read at once.
Invariant: a read either fills every given buffer with the expert's bytes, or raises `ReadFailed` that names file,
layer, expert, offset, bytes wanted and got; short reads are continued, a single EIO is tried again (EINTR is retried
by Python itself, PEP 475).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from .checkpoint import Checkpoint, open_checkpoint
from .errors import ReadFailed
from .layout import LayerTable
from .qpack import Container, is_container, open_container

# Linux cuts one call at 2,147,479,552 bytes, macOS refuses more than INT_MAX; both take at most 1,024 buffers.
MAX_CALL_BYTES = 1 << 30
MAX_CALL_BUFFERS = 1024
IO_THREADS = 8  # 8 beat 4 by 5 %, 16 added nothing (NVMe and an H200 host, 2026-11)

IO = Literal["cached", "direct"]
Rows = Sequence[memoryview]  # one writable byte view a section, in the order of the table's sections


class ExpertSource(Protocol):
    """Routed experts on disk. `tables` has an entry for each layer with experts; `origin` says what was repacked."""

    name: str
    origin: str
    tables: Mapping[int, LayerTable]

    def read(self, layer: int, first: int, rows: Sequence[Rows]) -> int:
        """Fill `rows[i]` with the sections of expert `first + i`; neighbours are read together.

        Returns:
            Section bytes read.

        Raises:
            ReadFailed: what was to be filled may then hold anything.
        """
        ...

    def close(self) -> None: ...


class ContainerSource:
    """Experts of a .qpack container: one `preadv` an expert, or a run of neighbouring experts.

    Args:
        container: opened and checked.
        io: `cached` leaves what was read in the page cache, `direct` does not.
    """

    def __init__(self, container: Container, io: IO = "cached") -> None:
        self.name = container.path.name
        self.origin = container.source
        self.tables = container.layers
        self._files = _Files(io)
        self._of = {
            n: (self._files.open(container.path / t.file_name), f"{self.name}/{t.file_name}", _without_gaps(t))
            for n, t in self.tables.items()
        }

    def read(self, layer: int, first: int, rows: Sequence[Rows]) -> int:
        table = self.tables[layer]
        fd, file, plain = self._of[layer]
        if plain and len(rows) == 1:  # decode: one expert, its sections as they lie
            self._files.fill(fd, first * table.stride, rows[0], table.payload_bytes, file, layer, first)
            return table.payload_bytes
        views: list[memoryview] = []
        for row in rows:
            at = 0
            for section, view in sorted(zip(table.sections, row, strict=True), key=lambda pair: pair[0].offset):
                if section.offset > at:
                    views.append(memoryview(bytearray(section.offset - at)))  # a gap or padding: read and dropped
                views.append(view)
                at = section.offset + section.size
            if at < table.stride:
                views.append(memoryview(bytearray(table.stride - at)))
        if at < table.stride:
            views.pop()  # the last blob's padding need not be read
        self._files.fill(fd, first * table.stride, views, sum(map(len, views)), file, layer, first)
        return table.payload_bytes * len(rows)

    def close(self) -> None:
        self._files.close()


class CheckpointSource:
    """Experts of an MLX checkpoint as it is: one read a section, since each expert is contiguous in its stack.

    Args:
        checkpoint: opened and checked.
        io: `cached` leaves what was read in the page cache, `direct` does not.
    """

    def __init__(self, checkpoint: Checkpoint, io: IO = "cached") -> None:
        self.name = checkpoint.folder.name
        self.origin = checkpoint.folder.name
        self.tables = checkpoint.tables
        self._files = _Files(io)
        self._places: dict[int, list[tuple[int, int, int, str]]] = {}  # fd, offset of expert 0, bytes, file
        for layer, table in self.tables.items():
            parts = checkpoint.experts[layer]
            self._places[layer] = [
                (
                    self._files.open(checkpoint.folder / parts[s.name].file),
                    parts[s.name].info.start,
                    s.size,
                    f"{self.name}/{parts[s.name].file}",
                )
                for s in table.sections
            ]

    def read(self, layer: int, first: int, rows: Sequence[Rows]) -> int:
        for index, (fd, start, size, file) in enumerate(self._places[layer]):
            views = [row[index] for row in rows]
            self._files.fill(fd, start + first * size, views, size * len(rows), file, layer, first)
        return self.tables[layer].payload_bytes * len(rows)

    def close(self) -> None:
        self._files.close()


def open_source(folder: Path, io: IO = "cached") -> tuple[ContainerSource | CheckpointSource, Container | Checkpoint]:
    """Open a model folder for streaming, whichever kind it is.

    Raises:
        FormatError, StreamingUnsupported: see `open_container` and `open_checkpoint`.
        ReadFailed: a file cannot be opened.
    """
    if is_container(folder):
        container = open_container(folder)
        return ContainerSource(container, io), container
    checkpoint = open_checkpoint(folder)
    return CheckpointSource(checkpoint, io), checkpoint


def _without_gaps(table: LayerTable) -> bool:
    """Whether the sections lie one behind the other in the order of the table."""
    at = 0
    for section in table.sections:
        if section.offset != at:
            return False
        at += section.size
    return True


class _Files:
    """Open descriptors, one a path, closed together or with the last reference."""

    def __init__(self, io: IO) -> None:
        self._fds: dict[Path, int] = {}
        self._nocache = getattr(fcntl, "F_NOCACHE", None) if io == "direct" else None
        # Linux: O_DIRECT wants aligned memory, and a slot is not. The pages are given back after each read instead.
        self._forget = getattr(os, "posix_fadvise", None) if io == "direct" and self._nocache is None else None

    def open(self, path: Path) -> int:
        if path not in self._fds:
            try:
                fd = self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ReadFailed(f"{path}: cannot be opened ({error.strerror})") from None
            if self._nocache is not None:
                fcntl.fcntl(fd, self._nocache, 1)
        return self._fds[path]

    def fill(self, fd: int, offset: int, views: Rows, wanted: int, file: str, layer: int, expert: int) -> None:
        """Fill all views, `wanted` bytes in all, from one place of a file, in as few calls as the system allows."""
        got, tried = 0, False
        while got < wanted:
            try:
                n = os.preadv(fd, _batch(views, wanted - got), offset + got)
            except OSError as error:
                if error.errno == errno.EIO and not tried:
                    tried = True
                    continue
                raise _failed(file, layer, expert, offset, wanted, got, error.strerror) from None
            if n == 0:
                raise _failed(file, layer, expert, offset, wanted, got, "the file ends there")
            got += n
            if got < wanted:
                views = _rest(views, n)
        if self._forget is not None:
            self._forget(fd, offset, wanted, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _batch(views: Rows, wanted: int) -> Rows:
    """The leading views that one call may take."""
    if len(views) <= MAX_CALL_BUFFERS and wanted <= MAX_CALL_BYTES:
        return views
    batch, room = [], MAX_CALL_BYTES
    for view in views[:MAX_CALL_BUFFERS]:
        batch.append(view[:room])
        room -= len(batch[-1])
        if room == 0:
            break
    return batch


def _rest(views: Rows, n: int) -> Rows:
    """The views still to be filled after `n` bytes."""
    for index, view in enumerate(views):
        if n < len(view):
            return [view[n:], *views[index + 1 :]]
        n -= len(view)
    return []


def _failed(file: str, layer: int, expert: int, offset: int, wanted: int, got: int, why: str | None) -> ReadFailed:
    return ReadFailed(
        f"{file}: layer {layer}, expert {expert}: {got} of {wanted} bytes read at offset {offset} ({why}). "
        "Check the disk and the file: `swiftlet-mlx verify CONTAINER`"
    )
