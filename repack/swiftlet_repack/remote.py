"""A checkpoint that is still at its source: its small files and its shards' headers here, its tensors there.

Knows listings, fetchers and the staging folder; lays nothing out and fetches no tensor. Invariant: the
`Checkpoint` it returns is the one that opening the downloaded folder would give, with the same refusals, in
the source's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from swiftlet_mlx.checkpoint import INDEX, Checkpoint, checkpoint_from_headers, shard_files
from swiftlet_mlx.config import read_config
from swiftlet_mlx.errors import SafetensorsError, SourceBroken, SwiftletError
from swiftlet_mlx.qpack import CONFIG
from swiftlet_mlx.safetensors import PREFIX_BYTES, Header, header_length, parse_header

from .delivery import whole
from .disk import in_words, sync_folder
from .fetch import Fetcher
from .hub import Listing
from .journal import Journal
from .names import check_names
from .origin import RemoteFile
from .pace import Pace
from .places import STATE, Places, Route, Segment
from .plan import SMALL_FILES
from .transfer import Transfer

SPARE = f"{STATE}/spare"
_SMALL_BYTES = 100_000_000  # tokenizers reach 30 MB
_LEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A checkpoint opened from afar.

    Args:
        checkpoint: as `open_checkpoint` gives it; its folder holds the small files only.
        shards: the files that hold its tensors, in order.
        headers: by shard.
    """

    checkpoint: Checkpoint
    shards: Mapping[str, RemoteFile]
    headers: Mapping[str, Header]


def small_files(listing: Listing) -> dict[str, RemoteFile]:
    """The files beside the tensors that a container needs: config, index, tokenizer, template.

    Raises:
        SourceBroken: if one is larger than such a file can be.
    """
    found = {name: listing.files[name] for name in (CONFIG, INDEX, *SMALL_FILES) if name in listing.files}
    for name, file in found.items():
        if file.size > _SMALL_BYTES:
            raise SourceBroken(f"{listing.source}: {name} has {file.size} bytes; at most {_SMALL_BYTES} are sensible")
    return found


def open_remote(listing: Listing, fetcher: Fetcher, places: Places, journal: Journal, pace: Pace) -> RemoteCheckpoint:
    """Fetch the small files and the headers into the staging folder, and open the checkpoint they describe.

    Raises:
        SourceBroken: if the index names a shard that the source does not have.
        SwiftletError: what `open_checkpoint` raises on such a folder, with the source's name for the
            folder's.
    """
    at = f"{STATE}/source/{PurePosixPath(listing.source.rstrip('/')).name or 'model'}"
    folder = places.root / at
    with in_words(folder):
        folder.mkdir(parents=True, exist_ok=True)
    small = small_files(listing)
    deliveries = [whole(f, f"{at}/{f.name}") for f in small.values()]
    Transfer(deliveries, fetcher, places, journal, pace=pace, again=True).run()
    for name, file in small.items():
        if not file.size:
            with in_words(folder):
                (folder / name).touch()
    with in_the_name_of(listing.source, folder):
        shards = _shards(listing, folder)
        headers = _headers(shards, fetcher, places, journal, pace.streams)
        with in_words(folder):
            sync_folder(places.path(SPARE))
        _, promised, warnings = shard_files(folder)
        checkpoint = checkpoint_from_headers(folder, read_config(folder), headers, promised, warnings)
    return RemoteCheckpoint(checkpoint, shards, headers)


def spare(shard: str) -> str:
    """Where bytes of a shard are kept that belong to its hash but not to the container."""
    return f"{SPARE}/{shard}"


@contextmanager
def in_the_name_of(source: str, folder: Path) -> Iterator[None]:
    """Errors about the staging folder's copy speak of the source instead."""
    try:
        yield
    except SwiftletError as error:
        text = str(error).replace(str(folder), source.rstrip("/"))
        raise type(error)(text) from None


def _shards(listing: Listing, folder: Path) -> dict[str, RemoteFile]:
    """The listed files that make up the checkpoint, by the rules of a local folder, on empty stand-ins."""
    index = folder / INDEX
    if index.exists():
        try:
            named = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            named = set()  # opening the folder says what is wrong with it
        missing = sorted(named - set(listing.files))
        if missing:
            raise SourceBroken(
                f"{listing.source}: {INDEX} names {', '.join(missing[:4])}, which "
                f"{'is' if len(missing) == 1 else 'are'} not there ({len(named) - len(missing)} of "
                f"{len(named)} shards found). The upload is incomplete: choose another --revision or another "
                "source"
            )
    for name in listing.files:
        if name.endswith(".safetensors") and "/" not in name:
            with in_words(folder):
                (folder / name).touch()
    names, _, _ = shard_files(folder)
    check_names(names, listing.source)
    return {name: listing.files[name] for name in names}


def _headers(
    shards: Mapping[str, RemoteFile], fetcher: Fetcher, places: Places, journal: Journal, streams: int
) -> dict[str, Header]:
    with ThreadPoolExecutor(streams) as pool:
        try:
            found = pool.map(lambda file: _header(file, fetcher, places, journal), shards.values())
            return dict(zip(shards, found, strict=True))
        except BaseException:
            fetcher.cancel.set()  # the others need not finish what nobody will use
            raise


def _header(file: RemoteFile, fetcher: Fetcher, places: Places, journal: Journal) -> Header:
    """A shard's header, from the staging folder if it is there, else by range; kept for the shard's hash."""
    stored = places.path(spare(file.name))
    if stored.exists() and journal.covered_to(file.name, 0) > PREFIX_BYTES:
        try:
            with in_words(stored), stored.open("rb") as stream:
                length = header_length(stream.read(_LEAD_BYTES), file.size, file.name)
                stream.seek(PREFIX_BYTES)
                return parse_header(stream.read(length), file.size, file.name)
        except SafetensorsError:
            pass  # what was lost on this disk is fetched again; what is wrong at the source comes again
    try:
        lead, text, header = _fetch_header(file, fetcher)
    except SafetensorsError:  # a byte may have gone wrong on the way: what is wrong at the source is wrong twice
        lead, text, header = _fetch_header(file, fetcher)
    whole = lead[:PREFIX_BYTES] + text
    places.write(Route(len(whole), [Segment(0, len(whole), spare(file.name))]), 0, whole)
    places.sync([spare(file.name)])
    journal.done((file.name, 0, len(whole)))
    return header


def _fetch_header(file: RemoteFile, fetcher: Fetcher) -> tuple[bytes, bytes, Header]:
    lead = fetcher.read(file, 0, min(_LEAD_BYTES, file.size))
    length = header_length(lead, file.size, file.name)
    text = fetcher.read(file, PREFIX_BYTES, PREFIX_BYTES + length)
    return lead, text, parse_header(text, file.size, file.name)
