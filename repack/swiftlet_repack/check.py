"""Whether a container holds what its source announces, by the source's own hashes; next to nothing is
fetched.

A shard's hash is taken from the container's bytes, put back into the shard's order; only the shard's header
and the tensors that were left out come over the network. Knows sources, plans and places. Invariant: nothing
in the container is changed, and a shard counts as right only if its whole hash fits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from swiftlet_mlx.errors import HashMismatch
from swiftlet_mlx.qpack import HASHES, Container, open_container
from swiftlet_mlx.safetensors import read_header

from .delivery import Delivery, whole
from .fetch import Fetcher
from .hashing import FileHashes
from .hub import Listing
from .journal import Journal
from .pace import Pace
from .places import Places, Route
from .plan import TensorFile, make_plan
from .ready import head_files, plan_ready
from .remote import in_the_name_of, open_remote, spare
from .sources import Source, is_ready_container
from .transfer import Transfer

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found right: files of the source and their bytes, and what came over the network for it."""

    source: str
    commit: str | None
    files: int
    nbytes: int
    fetched_bytes: int


def check_against(
    path: Path, source: Source, fetcher: Fetcher, progress: OnProgress = lambda done, total, what: None
) -> Checked:
    """Compare a container with the source it was, or could have been, installed from.

    Raises:
        ContainerError: the container's structure is wrong.
        HashMismatch: naming every source file whose hash does not fit.
        SwiftletError: the source cannot be read, or cannot be what this container was made from.
    """
    container = open_container(path)
    listing = source.listing(fetcher)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        with Journal.open(state / "journal") as journal, Places(state) as places:
            if is_ready_container(listing):
                deliveries = _ready(listing, fetcher, places, journal)
            else:
                deliveries = _checkpoint(container, listing, fetcher, places, journal)
        return _compare(path, listing, deliveries, fetcher, progress)


def _compare(
    path: Path, listing: Listing, deliveries: list[Delivery], fetcher: Fetcher, progress: OnProgress
) -> Checked:
    total = sum(d.file.size for d in deliveries)
    done = fetched = 0
    bad: list[str] = []
    with Places(path, read_only=True) as places:
        for delivery in deliveries:
            file = delivery.file
            hashes, apart = FileHashes(file.size, sha256=file.sha256, git_oid=file.git_oid), spare(delivery.file.name)
            for segment in delivery.route.segments:
                if segment.target == apart:
                    fetcher.stream(delivery.file, segment.start, segment.stop, hashes.sink)
                    fetched += segment.stop - segment.start
                else:
                    for block in places.read(delivery.route, segment.start, segment.stop):
                        hashes.update(block)
                done += segment.stop - segment.start
                progress(done, total, delivery.file.name)
            if not hashes.fit():
                bad.append(delivery.file.name)
    if bad:
        raise HashMismatch(
            f"{path}: {len(bad)} of {len(deliveries)} files of {listing.source} do not have the hash "
            f"announced there: {', '.join(bad[:4])}. `swiftlet-mlx verify {path}` tells whether the "
            "container was damaged later; if it was not, it was made from something else"
        )
    return Checked(listing.source, listing.commit, len(deliveries), total, fetched)


def _ready(listing: Listing, fetcher: Fetcher, places: Places, journal: Journal) -> list[Delivery]:
    heads = [whole(file) for file in head_files(listing).values()]
    Transfer(heads, fetcher, places, journal).run()
    files = plan_ready(listing, places.root).files
    return [whole(file) for name, file in files.items() if name != HASHES]


def _checkpoint(
    container: Container, listing: Listing, fetcher: Fetcher, places: Places, journal: Journal
) -> list[Delivery]:
    remote = open_remote(listing, fetcher, places, journal, Pace())
    with in_the_name_of(listing.source, remote.checkpoint.folder):
        plan = make_plan(remote.checkpoint)
    if dict(container.layers) != dict(plan.tables):
        raise HashMismatch(
            f"{container.path}: its layers have other sizes than those of {listing.source}; it was made from "
            "something else"
        )
    plan = replace(plan, tensor_files=tuple(_as_stored(container, file) for file in plan.tensor_files))
    shards = [
        Delivery(file, Route(file.size, plan.segments(name, file.size, spare(name))))
        for name, file in remote.shards.items()
    ]
    copied = [whole(listing.files[name]) for name in plan.copied if (container.path / name).is_file()]
    return shards + copied


def _as_stored(container: Container, file: TensorFile) -> TensorFile:
    """The same tensors at the offsets they have in this container, which another program may have written."""
    stored = {_bare(name): info for name, info in read_header(container.path / file.name).tensors.items()}
    lacking = [name for name, _, _ in file.tensors if _bare(name) not in stored]
    different = [
        name
        for name, at, _ in file.tensors
        if name not in lacking
        and (stored[_bare(name)].dtype, stored[_bare(name)].shape) != (at.info.dtype, at.info.shape)
    ]
    for names, what in ((lacking, "lacks"), (different, "has in another shape")):
        if names:
            raise HashMismatch(f"{container.path / file.name} {what} {names[0]} ({len(names)} such tensors)")
    return replace(file, tensors=tuple((name, at, stored[_bare(name)].start) for name, at, _ in file.tensors))


def _bare(name: str) -> str:
    return name.removeprefix("language_model.")  # both kinds of version 1 container
