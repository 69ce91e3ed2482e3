"""Repack a local MLX checkpoint: copy its bytes into a container, a few megabytes at a time.

Knows the plan, the staging folder and the reader; encodes nothing. Invariant: the output's name exists only
for a complete, flushed container whose hashes.json was computed from the very bytes that were written; a run
that was cut short is continued file by file, from the same source only, and gives the same bytes as an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from swiftlet_mlx.checkpoint import Checkpoint, open_checkpoint
from swiftlet_mlx.errors import DiskFull, ReadFailed, RepackError
from swiftlet_mlx.jsonfile import to_json
from swiftlet_mlx.layout import LayerTable
from swiftlet_mlx.qpack import HASHES, LAYOUT, MANIFEST
from swiftlet_mlx.reader import CheckpointSource
from swiftlet_mlx.whole import sync

from .disk import in_words
from .plan import Plan, TensorFile, make_plan, small_text
from .staging import MARGIN_BYTES, Staging, allocated_bytes, free_bytes

COPY_BYTES = 8 << 20  # one piece: full disk speed, and what the copy costs in memory

OnProgress = Callable[[int, int, str], None]


def repack_checkpoint(
    source: Path,
    output: Path,
    *,
    restart: bool = False,
    progress: OnProgress = lambda done, total, what: None,
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Make a container from a local MLX checkpoint folder.

    Args:
        source: The checkpoint.
        output: The container's path.
        restart: Throw away what an earlier, different attempt left at the same output.
        progress: Called with bytes done, bytes in all, and the file at work.
        warn: Called with each remark about the source.

    Returns:
        The container's path.

    Raises:
        CheckpointError, RawCheckpoint, StreamingUnsupported, FormatError: the source cannot be repacked;
            nothing was written.
        OutputExists, NotResumable, DiskFull: the output is in the way.
        RepackError: what was done so far is kept; the same command continues.
    """
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint)
    for text in (*plan.remarks, *(f"left out: {what}" for what in plan.left_out)):
        warn(text)
    small = {**{name: small_text(source, name) for name in plan.copied}, **plan.written}
    total = sum(plan.large_sizes.values())
    staging = Staging(output.expanduser().absolute())
    with staging.open(restart=restart) as journal:
        identity = _identity(checkpoint)
        journal.begin({"source": str(source.resolve()), "files": identity, "plan": _digest(plan)})
        _check_room(staging, total)
        done = 0
        with in_words(staging.folder):
            for name, nbytes, blocks in _large_files(plan):
                path = staging.folder / name
                if not (name in journal.verified and path.is_file() and path.stat().st_size == nbytes):
                    report = partial(_report, progress, done, total, name)
                    journal.mark_verified(name, _write(path, blocks, report))
                done += nbytes
                progress(done, total, name)
            _same_still(checkpoint, identity)
            write_rest(staging.folder, plan, small, journal.verified, source.resolve().name)
        staging.seal()
    return output


def _large_files(plan: Plan) -> Iterator[tuple[str, int, Iterator[memoryview]]]:
    """Every large file of the container: name, size, and its bytes in order."""
    for file in plan.tensor_files:
        yield file.name, file.file_bytes, _tensor_blocks(plan.checkpoint, file)
    source = CheckpointSource(plan.checkpoint)
    try:
        for table in plan.tables.values():
            large = table.stride > COPY_BYTES
            blocks = _large_blobs(plan.checkpoint, table) if large else _layer_blocks(source, table)
            yield table.file_name, table.file_bytes, blocks
    finally:
        source.close()


def _tensor_blocks(checkpoint: Checkpoint, file: TensorFile) -> Iterator[memoryview]:
    yield memoryview(file.header)
    buffer = memoryview(bytearray(COPY_BYTES))
    for name, at, _ in file.tensors:
        yield from _range(checkpoint.folder / at.file, at.info.start, at.info.nbytes, name, buffer)


def _layer_blocks(source: CheckpointSource, table: LayerTable) -> Iterator[memoryview]:
    """A layer's blobs in order: sections side by side, zeros up to the stride."""
    run = max(1, COPY_BYTES // table.stride)
    buffer = memoryview(bytearray(min(run, table.expert_count) * table.stride))
    for first in range(0, table.expert_count, run):
        count = min(run, table.expert_count - first)
        rows = [
            [buffer[e * table.stride + s.offset :][: s.size] for s in table.sections] for e in range(count)
        ]  # the padding between them stays zero
        source.read(table.layer, first, rows)
        yield buffer[: count * table.stride]


def _large_blobs(checkpoint: Checkpoint, table: LayerTable) -> Iterator[memoryview]:
    """The same for experts too large to be held whole: section after section, a piece at a time."""
    buffer = memoryview(bytearray(COPY_BYTES))
    padding = memoryview(bytes(table.stride - table.payload_bytes))
    for expert in range(table.expert_count):
        for section in table.sections:
            at = checkpoint.experts[table.layer][section.name]
            start = at.info.start + expert * section.size
            yield from _range(checkpoint.folder / at.file, start, section.size, section.name, buffer)
        yield padding


def _range(path: Path, start: int, nbytes: int, what: str, buffer: memoryview) -> Iterator[memoryview]:
    """Bytes of one file in order, each piece valid until the next."""
    left = nbytes
    try:
        with open(path, "rb", buffering=0) as source:
            source.seek(start)
            while left:
                n = source.readinto(buffer[: min(left, len(buffer))])
                if not n:
                    raise ReadFailed(f"{path}: ends {left} bytes before the end of {what}")
                yield buffer[:n]
                left -= n
    except OSError as error:
        raise ReadFailed(f"{path}: {what}: {nbytes - left} of {nbytes} bytes read ({error.strerror})") from None


def _write(path: Path, blocks: Iterator[memoryview], on_bytes: Callable[[int], None]) -> str:
    """Write blocks into a new file, flush it, return the sha256 of what was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, done = hashlib.sha256(), 0
    with open(path, "wb", buffering=0) as file:
        for block in blocks:
            digest.update(block)
            while block:
                block = block[file.write(block) :]
            done = file.tell()
            on_bytes(done)
        sync(file.fileno())
    return digest.hexdigest()


def write_rest(folder: Path, plan: Plan, small: Mapping[str, bytes], hashes: Mapping[str, str], source: str) -> None:
    """Small files, then the manifest with all sizes, then the hashes of everything."""
    digests = dict(hashes)
    for name, data in small.items():
        digests[name] = _write(folder / name, iter([memoryview(data)]), lambda n: None)
    sizes = {**plan.large_sizes, **{name: len(data) for name, data in small.items()}}
    manifest = plan.manifest(source, sizes)
    digests[MANIFEST] = _write(folder / MANIFEST, iter([memoryview(manifest)]), lambda n: None)
    _write(folder / HASHES, iter([memoryview(to_json({"files": dict(sorted(digests.items()))}))]), lambda n: None)


def _report(progress: OnProgress, before: int, total: int, name: str, written: int) -> None:
    progress(before + written, total, name)


def _identity(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """What tells a changed source from the same one: size and time of each shard."""
    found = {}
    for name in checkpoint.files:
        stat = (checkpoint.folder / name).stat()
        found[name] = [stat.st_size, stat.st_mtime_ns]
    return found


def _digest(plan: Plan) -> str:
    """What tells another plan for the same files from this one: another config, other headers, another
    version."""
    told = hashlib.sha256(plan.written[LAYOUT])
    for file in plan.tensor_files:
        told.update(file.header)
    for tensors in (plan.checkpoint.dense, plan.checkpoint.mtp, *plan.checkpoint.experts.values()):
        for name, at in sorted(tensors.items()):
            told.update(repr((name, at.file, at.info.start, at.info.stop)).encode())
    return told.hexdigest()


def _same_still(checkpoint: Checkpoint, identity: Mapping[str, list[int]]) -> None:
    again = open_checkpoint(checkpoint.folder)
    if again != checkpoint or _identity(again) != identity:
        raise RepackError(f"{checkpoint.folder} changed while it was read; repeat the command with --restart")


def _check_room(staging: Staging, total: int) -> None:
    needed = total + MARGIN_BYTES - allocated_bytes(staging.folder)
    free = free_bytes(staging.output.parent)
    if free < needed:
        raise DiskFull(
            f"{staging.output.parent}: {needed / 1e9:.2f} GB are needed there, {free / 1e9:.2f} GB are free. "
            "Make room, or choose another --output"
        )
