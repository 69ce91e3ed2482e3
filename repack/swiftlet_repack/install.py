"""Install a model: from a hub or a mirror to a verified container, over whatever happens on the way.

Ties source, staging, plan, transfer and finish together; each does its own work. Knows no terminal: what is
to be shown is an `Outline` before and `Progress` during. Invariant: repeated with the same arguments until it
returns, it gives the same container, byte for byte, however often and wherever it was stopped.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from swiftlet_mlx.config import ModelConfig
from swiftlet_mlx.errors import Cancelled, NotResumable, SourceBroken, SourceChanged
from swiftlet_mlx.jsonfile import to_json
from swiftlet_mlx.layout import LayerTable
from swiftlet_mlx.library import ORIGIN
from swiftlet_mlx.qpack import DENSE, HASHES, open_container
from swiftlet_mlx.units import size

from .delivery import Delivery, Repair, whole
from .disk import in_words, sync_folder
from .early import EarlyHashes
from .fetch import Fetcher
from .hub import Listing
from .outline import Outline, beyond_bytes
from .pace import Pace
from .patience import Patience, Retry
from .places import Places, Route, Segment
from .plan import Plan, make_plan, small_text
from .ready import head_files, plan_ready
from .remote import in_the_name_of, open_remote, spare
from .sources import Source, is_ready_container
from .staging import MARGIN_BYTES, Staging, allocated_bytes, free_bytes
from .transfer import Progress, Transfer
from .write import write_rest

HASHERS = 2


@dataclass(frozen=True, slots=True)
class Job:
    """A plan that both kinds of source come down to."""

    deliveries: tuple[Delivery, ...]
    sizes: Mapping[str, int]
    tables: Mapping[int, LayerTable]
    config: Mapping[str, Any]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    headers: Mapping[str, int]  # bytes at the beginning of each source file on which the plan itself rests
    plan: Plan | None = None  # of a checkpoint; a ready container needs none
    small: Mapping[str, bytes] = field(default_factory=dict)  # files beside the tensors, by name


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished installation."""

    output: Path
    repairs: tuple[Repair, ...]


class Installation:
    """One installation, as a context manager: `look`, ask, `carry_out`.

    Args:
        source: a `Hub` or a `Mirror`.
        output: path of the container to be.
        restart: throw away what an earlier, different attempt left at the same output.
        patience, pace: limits of the network and cuts of the work.
        on_retry: told about every wait.
    """

    def __init__(
        self,
        source: Source,
        output: Path,
        *,
        restart: bool = False,
        patience: Patience | None = None,
        pace: Pace | None = None,
        on_retry: Callable[[Retry], None] | None = None,
    ) -> None:
        self.source, self.output = source, output.expanduser().absolute()
        self.pace = pace or Pace()
        self.cancel = threading.Event()
        self.fetcher = Fetcher(source, patience=patience, cancel=self.cancel, on_retry=self._retry)
        self._on_retry = on_retry or (lambda retry: None)
        self._restart = restart
        self._staging = Staging(self.output)
        self._transfer: Transfer | None = None
        self._new = False

    def __enter__(self) -> Installation:
        self._journal = self._staging.open(restart=self._restart)
        self._new = not self._journal.identity
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        if self._new and self._staging.state.exists():
            self._staging.discard()  # nothing large was fetched: leave nothing behind

    def look(self) -> Outline:
        """List the source, fetch its small files, and plan.

        Raises:
            SwiftletError: for anything that stands in the way; nothing large was fetched.
        """
        identity = self._journal.identity
        same = str(identity.get("source", "")).casefold() == self.source.name.casefold()
        pinned = identity.get("commit") if same and identity.get("revision") == self.source.revision else None
        self._listing = listing = self.source.listing(self.fetcher, commit=pinned)
        self._begin(listing)
        with Places(self._staging.folder) as places:
            plan = self._plan_ready if is_ready_container(listing) else self._plan_checkpoint
            self._job = job = plan(listing, places)
        self._check_plan(job)
        return self._outline(listing, job)

    def carry_out(self, on_progress: Callable[[Progress], None] | None = None) -> Outcome:
        """Fetch, verify, finish, and give the container its name. Call `look` first.

        Raises:
            Cancelled: when interrupted; repeat the same command to continue.
            SwiftletError: for anything else; what was fetched is kept.
        """
        job, report = self._job, on_progress or (lambda progress: None)
        self._new = False
        with Places(self._staging.folder, job.sizes) as places, ThreadPoolExecutor(HASHERS) as pool:
            places.create()
            for folder in {places.path(name).parent for name in job.sizes}:
                with in_words(folder):
                    sync_folder(folder)  # a flushed file is no use if a power cut takes its name
            if is_ready_container(self._listing):
                open_container(self._staging.folder)  # sizes, layout and config agree before anything large comes
            for file in job.plan.tensor_files if job.plan else ():
                head = Route(len(file.header), [Segment(0, len(file.header), file.name)])
                places.write(head, 0, file.header)
            hasher = None
            if job.plan is not None:  # a file that is copied as it is keeps the hash it came with
                hasher = EarlyHashes(job.deliveries, job.sizes, self._staging.folder, self._journal, pool, self.cancel)

            def watch(moment: Progress) -> None:
                if hasher is not None:
                    hasher.look()
                report(moment)

            self._transfer = Transfer(
                job.deliveries,
                self.fetcher,
                places,
                self._journal,
                pace=self.pace,
                on_progress=watch,
                on_verified=self._drop_spare,
            )
            try:
                self._transfer.run()
                repairs = tuple(self._transfer.repairs)
                self._check_headers(repairs)
                if hasher is not None:
                    hashes = hasher.result(repairs, report)
                else:
                    hashes = {name: self._journal.verified[name] for name in job.sizes}
            except KeyboardInterrupt:
                self.cancel.set()
                raise Cancelled(f"interrupted; {self._kept()}") from None
        self._finish(hashes)
        return Outcome(self.output, repairs)

    # -- what is being installed --------------------------------------------------------------------

    def _begin(self, listing: Listing) -> None:
        """Bind the journal to this source; a folder begun from another one is refused by name."""
        identity: dict[str, Any] = {
            "source": listing.source,
            "revision": self.source.revision,
            "commit": listing.commit,
        }
        before = self._journal.identity
        if listing.commit is None:
            identity["files"] = {f.name: [f.size, f.sha256, f.etag] for f in listing.files.values()}
            known = before.get("files", identity["files"]) if before.get("source") == listing.source else {}
            changed = [name for name, told in known.items() if identity["files"].get(name) != told]
            if changed:
                raise SourceChanged(
                    f"{listing.source}: {changed[0]} was replaced since this installation began. Repeat the "
                    "command with --restart to install what is there now"
                )
        self._journal.begin(identity)

    def _check_plan(self, job: Job) -> None:
        """The same source gives the same plan, unless another version of this program made the first one."""
        told = hashlib.sha256()
        for delivery in job.deliveries:
            told.update(repr((delivery.file.name, delivery.route.segments)).encode())
        told.update(repr(sorted(job.sizes.items())).encode())
        before = self._journal.notes.get("plan")
        if before is None:
            self._journal.note("plan", told.hexdigest())
        elif before != told.hexdigest():
            raise NotResumable(
                f"{self._staging.folder} was begun by another version of this program, which places bytes "
                "otherwise. Finish with that version, or pass --restart to begin anew"
            )

    def _plan_ready(self, listing: Listing, places: Places) -> Job:
        heads = [whole(file) for file in head_files(listing).values()]
        Transfer(heads, self.fetcher, places, self._journal, pace=self.pace, again=True).run()
        plan = plan_ready(listing, places.root)
        return Job(
            deliveries=tuple(whole(file) for file in plan.files.values()),
            sizes={name: file.size for name, file in plan.files.items()},
            tables=plan.tables,
            config=plan.config,
            left_out=plan.ignored,
            warnings=(),
            headers={},
        )

    def _plan_checkpoint(self, listing: Listing, places: Places) -> Job:
        remote = open_remote(listing, self.fetcher, places, self._journal, self.pace)
        folder = remote.checkpoint.folder
        with in_the_name_of(listing.source, folder):
            plan = make_plan(remote.checkpoint)
            small = {**{name: small_text(folder, name) for name in plan.copied}, **plan.written}
        headers = {name: header.data_start for name, header in remote.headers.items()}
        deliveries = []
        for name, file in remote.shards.items():
            segments = plan.segments(name, file.size, spare(name))
            left_out = sum(s.size for s in segments if s.target == spare(name)) - headers[name]
            deliveries.append(Delivery(file, Route(file.size, segments), left_out))
        deliveries.sort(key=lambda d: -d.passing_bytes)  # what is left out comes while the disk is emptiest
        return Job(
            deliveries=tuple(deliveries),
            sizes=plan.large_sizes,
            tables=plan.tables,
            config=remote.checkpoint.config,
            left_out=plan.left_out,
            warnings=tuple(text.replace(str(folder), listing.source) for text in plan.remarks),
            headers=headers,
            plan=plan,
            small=small,
        )

    def _outline(self, listing: Listing, job: Job) -> Outline:
        total = sum(d.file.size for d in job.deliveries)
        missing = sum(
            stop - start for d in job.deliveries for start, stop in self._journal.missing(d.file.name, d.file.size)
        )
        output = sum(job.sizes.values()) + sum(map(len, job.small.values()))
        taken = allocated_bytes(self._staging.folder)
        top_k = ModelConfig.from_dict(job.config, listing.source).top_k
        return Outline(
            source=listing.source,
            commit=listing.commit,
            output=self.output,
            ready=is_ready_container(listing),
            resumed=not self._new,
            download_bytes=total,
            missing_bytes=missing,
            output_bytes=output,
            needed_bytes=max(0, output + beyond_bytes(job.deliveries) + MARGIN_BYTES - taken),
            free_bytes=free_bytes(self.output.parent),
            dense_bytes=job.sizes.get(DENSE, 0),
            token_bytes=sum(table.payload_bytes * max(top_k, 1) for table in job.tables.values()),
            left_out=job.left_out,
            warnings=job.warnings,
        )

    # -- the end ------------------------------------------------------------------------------------

    def _check_headers(self, repairs: tuple[Repair, ...]) -> None:
        for repair in repairs:
            if repair.start < self._job.headers.get(repair.file, 0):
                raise SourceBroken(
                    f"{repair.file}: its header had arrived wrong (bytes {repair.start}-{repair.stop - 1}), "
                    "so the rest may lie in wrong places. Repeat the command with --restart"
                )

    def _finish(self, hashes: Mapping[str, str]) -> None:
        """Write what is known only now, flush, and rename."""
        job, folder = self._job, self._staging.folder
        record: dict[str, Any] = {
            "source": self._listing.source,
            "revision": self._listing.commit,
            "files": {d.file.name: self._journal.verified[d.file.name] for d in job.deliveries},
        }
        with in_words(folder):
            if job.plan is not None:
                write_rest(folder, job.plan, job.small, hashes, self._listing.source)
            elif HASHES not in job.sizes:
                (folder / HASHES).write_bytes(to_json({"files": hashes}))
            if ORIGIN not in job.sizes:
                (folder / ORIGIN).write_bytes(to_json(record))
        self._staging.seal()

    def _drop_spare(self, delivery: Delivery) -> None:
        """Free what was kept only for a shard's hash; its header stays, the plan is made from it again."""
        path = self._staging.folder / spare(delivery.file.name)
        if path.exists() and self._job.plan is not None:
            with in_words(path):
                os.truncate(path, self._job.headers[delivery.file.name])

    def _kept(self) -> str:
        kept = size(self._journal.done_bytes())
        return f"{kept} are kept in {self._staging.folder}; repeat the same command to continue"

    def _retry(self, retry: Retry) -> None:
        if self._transfer is not None:
            self._transfer.count_retry()
        self._on_retry(retry)
