"""Whether a container holds the bytes it should: by its own hashes, or byte for byte against its source.

Knows containers, checkpoints and bytes; not where progress is shown. Invariant: everything is looked at before the
verdict, so one run names every bad file; memory stays at a few megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlet_mlx.checkpoint import Checkpoint, Located, open_checkpoint
from swiftlet_mlx.errors import ContainerError, HashMismatch, ReadFailed
from swiftlet_mlx.layout import LayerTable, Section, layer_file
from swiftlet_mlx.qpack import DENSE, HASHES, LAYOUT, MANIFEST, Container, open_container, read_json, safe_relative
from swiftlet_mlx.reader import CheckpointSource, ContainerSource, ExpertSource
from swiftlet_mlx.safetensors import read_header

from .hashing import hash_files
from .plan import MTP

BLOCK_BYTES = 8 << 20
_SHOWN = 5  # faults named in one message

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Verified:
    """What was checked and found right. Sizes are bytes.

    `hashed_files` is 0 for a container without hashes.json; `unhashed` are files that hashes.json does not name.
    """

    hashed_files: int
    hashed_bytes: int
    compared_bytes: int
    unhashed: tuple[str, ...]


def verify(
    path: Path,
    source: Path | None = None,
    *,
    progress: OnProgress = lambda done, total, what: None,
) -> Verified:
    """Check a container's structure, then every byte there is something to check against.

    Args:
        path: The container.
        source: The checkpoint it was made from, to compare with byte for byte.
        progress: Called with bytes done, bytes in all, and what is being checked.

    Raises:
        ContainerError, SafetensorsError: the structure is wrong.
        HashMismatch: naming the files, or the tensors, whose bytes differ, and the first offset.
    """
    container = open_container(path)
    hashes = read_hashes(path)
    hashed_bytes = _check_hashes(container, hashes, progress)
    for name in (DENSE, MTP):
        if (path / name).is_file():
            read_header(path / name)
    compared = _compare(container, open_checkpoint(source), progress) if source is not None else 0
    named = {*container.files, DENSE, MANIFEST, LAYOUT, *(t.file_name for t in container.layers.values())}
    return Verified(len(hashes), hashed_bytes, compared, tuple(sorted(named - set(hashes))) if hashes else ())


def read_hashes(path: Path) -> dict[str, str]:
    """The relative paths and sha256 of hashes.json; empty if there is none.

    Raises:
        ContainerError: if it is there but cannot be used.
    """
    if not (path / HASHES).is_file():
        return {}
    files = read_json(path / HASHES, missing=ContainerError).get("files")
    if not isinstance(files, dict) or not all(isinstance(v, str) and len(v) == 64 for v in files.values()):
        raise ContainerError(f"{path / HASHES}: not a list of sha256 hashes; fetch the file again")
    return {safe_relative(name, str(path / HASHES)): digest.lower() for name, digest in files.items()}


def _check_hashes(container: Container, hashes: Mapping[str, str], progress: OnProgress) -> int:
    sizes, missing = {}, []
    for name in hashes:
        try:
            sizes[name] = (container.path / name).stat().st_size
        except OSError:
            missing.append(name)
    total = sum(sizes.values())
    try:
        found = hash_files(container.path, sizes, lambda done: progress(done, total, "hashes"))
    except OSError as error:
        raise ReadFailed(f"{error.filename}: cannot be read ({error.strerror}); check the disk") from None
    bad = [f"{name} is missing" for name in missing]
    bad += [f"{name} has other bytes than were hashed" for name, digest in found.items() if digest != hashes[name]]
    _refuse(container.path, bad, "Copy or install the container again")
    return total


def _compare(container: Container, checkpoint: Checkpoint, progress: OnProgress) -> int:
    """Every tensor of the container against the checkpoint's, in both directions."""
    alike = dict(container.layers) == dict(checkpoint.tables)
    bad = [] if alike else ["the experts' tables differ from the source's"]
    dense = {_bare(n): at for n, at in checkpoint.dense.items()}
    total = sum(at.info.nbytes for at in checkpoint.dense.values()) + checkpoint.expert_bytes
    done = _compare_tensors(
        container.path / DENSE, dense, checkpoint, bad, lambda n: progress(n, total, "dense weights")
    )
    if (container.path / MTP).is_file():
        mtp = {_bare(n): at for n, at in checkpoint.mtp.items()}
        done += _compare_tensors(container.path / MTP, mtp, checkpoint, bad, lambda n: None)
    if alike:
        done = _compare_experts(container, checkpoint, done, total, bad, progress)
    _refuse(container.path, bad, f"Repack it: `swiftlet-mlx repack --source {checkpoint.folder} --output NEW.qpack`")
    return done


def _compare_tensors(
    path: Path, expected: Mapping[str, Located], checkpoint: Checkpoint, bad: list[str], on_bytes: Callable[[int], None]
) -> int:
    ours = {_bare(n): info for n, info in read_header(path).tensors.items()}
    bad += [f"{path.name} lacks tensor {n}" for n in sorted(expected.keys() - ours.keys())]
    bad += [f"{path.name} has tensor {n}, which the source has not" for n in sorted(ours.keys() - expected.keys())]
    done = 0
    for name in sorted(expected.keys() & ours.keys()):
        at, info = expected[name], ours[name]
        if (at.info.dtype, at.info.shape) != (info.dtype, info.shape):
            bad.append(f"{path.name}: tensor {name} is {info.dtype} {list(info.shape)}, in the source {at.info.dtype} "
                       f"{list(at.info.shape)}")  # fmt: skip
            continue
        first = _first_difference(path, info.start, checkpoint.folder / at.file, at.info.start, info.nbytes)
        if first is not None:
            bad.append(f"{path.name}: tensor {name} differs from byte {first} on")
        done += info.nbytes
        on_bytes(done)
    return done


def _first_difference(path: Path, start: int, other: Path, other_start: int, nbytes: int) -> int | None:
    with open(path, "rb", buffering=0) as a, open(other, "rb", buffering=0) as b:
        a.seek(start)
        b.seek(other_start)
        at = 0
        while at < nbytes:
            want = min(BLOCK_BYTES, nbytes - at)
            left, right = _read_all(a, want), _read_all(b, want)
            if left != right:
                return at + next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
            at += want
    return None


def _read_all(file: Any, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = file.read(n - len(data))
        if not more:
            raise ReadFailed(f"{file.name}: ends {n - len(data)} bytes too early")
        data += more
    return data


def _compare_experts(
    container: Container, checkpoint: Checkpoint, done: int, total: int, bad: list[str], progress: OnProgress
) -> int:
    ours, theirs = ContainerSource(container), CheckpointSource(checkpoint)
    try:
        for layer, table in container.layers.items():
            if table.stride > BLOCK_BYTES:
                faults = _large_differences(container, checkpoint, table)
            else:
                faults = _layer_differences(ours, theirs, table)
            for expert, section, first in faults:
                bad.append(
                    f"{table.file_name}: expert {expert}, {section.name} differs from byte {first} on "
                    f"(offset {expert * table.stride + section.offset + first} in the file)"
                )
            done += table.expert_count * table.payload_bytes
            progress(done, total, layer_file(layer))
    finally:
        ours.close()
        theirs.close()
    return done


Fault = tuple[int, Section, int]  # expert, section, first byte of it that differs


def _layer_differences(ours: ExpertSource, theirs: ExpertSource, table: LayerTable) -> Iterator[Fault]:
    left, right = ([bytearray(s.size) for s in table.sections] for _ in range(2))
    for expert in range(table.expert_count):
        ours.read(table.layer, expert, [[memoryview(b) for b in left]])
        theirs.read(table.layer, expert, [[memoryview(b) for b in right]])
        for section, a, b in zip(table.sections, left, right, strict=True):
            if a != b:
                yield expert, section, next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)


def _large_differences(container: Container, checkpoint: Checkpoint, table: LayerTable) -> Iterator[Fault]:
    """The same for experts too large to be held whole."""
    for expert in range(table.expert_count):
        for section in table.sections:
            at = checkpoint.experts[table.layer][section.name]
            first = _first_difference(
                container.path / table.file_name,
                expert * table.stride + section.offset,
                checkpoint.folder / at.file,
                at.info.start + expert * section.size,
                section.size,
            )
            if first is not None:
                yield expert, section, first


def _refuse(path: Path, bad: list[str], remedy: str) -> None:
    if bad:
        shown = "; ".join(bad[:_SHOWN]) + (f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
        raise HashMismatch(f"{path}: {shown}. {remedy}")


def _bare(name: str) -> str:
    """A tensor's name as both kinds of version 1 container spell it."""
    return name.removeprefix("language_model.")
