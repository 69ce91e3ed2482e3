"""A ready container at a source: which of its files are fetched, and what is checked before the first large
byte.

Knows manifest, layout and hashes; fetches only small JSON files. Invariant: a file is planned only if the
manifest names it or the format knows it (Swiftlet's installer lists the large files only), its path stays
inside the folder, and the source announces the size that manifest and layout give it; so a source cannot make
an installation write anything else, or more than it said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlet_mlx.errors import (
    ContainerError,
    MissingPart,
    NotAContainer,
    SourceBroken,
    UnknownVersion,
    WrongSize,
)
from swiftlet_mlx.jsonfile import MAX_JSON_BYTES
from swiftlet_mlx.layout import LayerTable, parse_layout
from swiftlet_mlx.qpack import CONFIG, DENSE, HASHES, LAYOUT, MAGIC, MANIFEST, MAX_FILES, read_json, safe_relative

from .hub import Listing
from .mirror import parse_hashes
from .names import check_names
from .origin import RemoteFile
from .plan import SMALL_FILES

HEAD_FILES = (MANIFEST, LAYOUT, CONFIG, HASHES)  # read before the plan is made


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """What to fetch of a ready container. `tables` are its layers; `ignored` files are at the source and not
    fetched."""

    files: Mapping[str, RemoteFile]
    tables: Mapping[int, LayerTable]
    config: Mapping[str, Any]
    ignored: tuple[str, ...]


def head_files(listing: Listing) -> dict[str, RemoteFile]:
    """The small files that say what a container holds.

    Raises:
        MissingPart: if the source lacks one that every container has.
        SourceBroken: if one is too large to be what it claims.
    """
    found = {name: listing.files[name] for name in HEAD_FILES if name in listing.files}
    for name in (MANIFEST, LAYOUT, CONFIG):
        if name not in found:
            raise MissingPart(f"{listing.source}: {name} is not there; the container at the source is incomplete")
    for name, file in found.items():
        if file.size > MAX_JSON_BYTES:
            raise SourceBroken(f"{listing.source}: {name} has {file.size} bytes, at most {MAX_JSON_BYTES} are possible")
    return found


def plan_ready(listing: Listing, folder: Path) -> ReadyPlan:
    """Decide what to fetch, from the head files that lie in `folder`.

    Raises:
        ContainerError: for a manifest that is none, a file that is missing, a size that differs.
        SourceBroken: if the container's own hashes contradict the source's.
    """
    where = listing.source
    sizes = _manifest_sizes(folder, where)
    tables, _, _ = parse_layout(read_json(folder / LAYOUT, MissingPart), where)
    config = read_json(folder / CONFIG, MissingPart)
    for table in tables.values():
        if sizes.setdefault(table.file_name, table.file_bytes) != table.file_bytes:
            raise WrongSize(
                f"{where}: the manifest gives {table.file_name} {sizes[table.file_name]} bytes, the layout "
                f"{table.file_bytes}; the container at the source is damaged"
            )
    wanted = {**dict.fromkeys((MANIFEST, LAYOUT, CONFIG, DENSE)), **sizes}
    for name in (HASHES, *SMALL_FILES):
        if name in listing.files:
            wanted.setdefault(name)
    check_names(wanted, where)
    faults = []
    for name, size in wanted.items():
        if name not in listing.files:
            faults.append(f"{name} is missing")
        elif size is not None and listing.files[name].size != size:
            faults.append(f"{name} has {listing.files[name].size} bytes of {size}")
    if faults:
        shown = "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")
        kind = MissingPart if "missing" in faults[0] else WrongSize
        raise kind(f"{where}: {shown}. The container at the source is incomplete: choose another source or --revision")
    files = {name: listing.files[name] for name in wanted}
    if HASHES in files:
        files = _with_own_hashes(files, parse_hashes((folder / HASHES).read_bytes(), f"{where}: {HASHES}"), where)
    ignored = tuple(sorted(set(listing.files) - set(files)))
    return ReadyPlan(files, tables, config, ignored)


def _manifest_sizes(folder: Path, where: str) -> dict[str, int | None]:
    manifest = read_json(folder / MANIFEST, NotAContainer)
    if manifest.get("magic") != MAGIC:
        raise NotAContainer(f"{where}: manifest.json has magic {manifest.get('magic')!r}, {MAGIC!r} was expected")
    if manifest.get("version") not in (1, 2):
        raise UnknownVersion(
            f"{where}: container version {manifest.get('version')!r}; this program reads 1 and 2. "
            "Upgrade with `pip install -U swiftlet-mlx`"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not files or len(files) > MAX_FILES:
        raise ContainerError(f"{where}: manifest.json has no usable list of files")
    for name, size in files.items():
        safe_relative(name, where)
        if type(size) is not int or size < 0:
            raise ContainerError(f"{where}: manifest.json gives {name} the size {size!r}")
    return dict(files)


def _with_own_hashes(files: Mapping[str, RemoteFile], own: Mapping[str, str], where: str) -> dict[str, RemoteFile]:
    """Add the container's own hashes where the source announces none; where it does, both must agree."""
    merged = {}
    for name, file in files.items():
        digest = own.get(name) if name != HASHES else None
        if digest and file.sha256 and digest != file.sha256:
            raise SourceBroken(
                f"{where}: {name} has the hash {file.sha256[:12]}… at the source, its {HASHES} says "
                f"{digest[:12]}…; the container there was changed after it was made"
            )
        merged[name] = RemoteFile(
            name, file.url, file.size, sha256=file.sha256 or digest, git_oid=file.git_oid, etag=file.etag
        )
    return merged
