"""Bring every byte of a source's files to its place on disk, several ranges at once, and prove that it is
there.

Knows deliveries (a remote file and where its bytes go), streams and hashes; not hubs, tensors or terminals.
What is hashed is what is read back from the places, in source order, so a hash that fits vouches for the
network, for the scattering and for the disk. Invariant: a range is recorded in the journal only after its
bytes were written, and as done only after they were flushed, by a thread of its own so that no stream waits
for the disk. A file is recorded as verified only after all of it, as it lies on disk, had the hash that the
source announced.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from swiftlet_mlx.errors import Cancelled, HashMismatch

from .fetch import Fetcher, RemoteFile
from .hashing import FileHashes
from .journal import Journal
from .patience import Retry
from .places import Places, Route

SYNC_BYTES = 64 << 20  # how much may wait to be flushed: what a power cut can cost
SYNC_SECONDS = 5.0
VERIFIERS = 2  # files hashed at once: one hash runs at 1 to 2 GB/s
JOIN_SECONDS = 5.0  # a stream that waits for the network when everything stops is left to end by itself
REPAIR_BYTES = 16 << 20  # how much is compared before the file is hashed again in the hope that this was all


@dataclass(frozen=True, slots=True)
class Delivery:
    """One remote file and where its bytes belong."""

    file: RemoteFile
    route: Route

    def __post_init__(self) -> None:
        if self.route.size != self.file.size:
            raise ValueError(f"{self.file.name} has {self.file.size} bytes, its route {self.route.size}")


@dataclass(frozen=True, slots=True)
class Pace:
    """How the work is cut up.

    `span_bytes` is one request: large enough that waiting for the first byte is small beside it.
    `record_bytes` and `record_seconds`, whichever comes first, is what a kill can cost each stream.
    """

    streams: int = 4
    span_bytes: int = 64 << 20
    record_bytes: int = 4 << 20
    record_seconds: float = 1.0

    def __post_init__(self) -> None:
        if min(self.streams, self.span_bytes, self.record_bytes) < 1:
            raise ValueError(f"impossible pace {self}")


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a transfer. `done_bytes` counts what was in place before; `fetched_bytes` only this run."""

    total_bytes: int
    done_bytes: int = 0
    fetched_bytes: int = 0
    hashed_bytes: int = 0
    files: int = 0
    verified_files: int = 0
    current: str = ""
    retries: int = 0
    last_retry: Retry | None = None
    phase: Literal["fetching", "hashing"] = "fetching"


@dataclass(frozen=True, slots=True)
class Repair:
    """Bytes `[start, stop)` of a source file that had arrived wrong and were fetched again."""

    file: str
    start: int
    stop: int


class Transfer:
    """One run over a set of deliveries; make a new one to try again.

    Args:
        deliveries: in the order in which they should be fetched.
        fetcher: whose `cancel` event also stops this transfer.
        places, journal: opened by the caller, who closes them after `run` has returned.
        pace: streams and sizes.
        on_progress: called about ten times a second from the thread that calls `run`.
        on_verified: called for each file that is verified, now or by an earlier run, from another thread.
    """

    def __init__(
        self,
        deliveries: Iterable[Delivery],
        fetcher: Fetcher,
        places: Places,
        journal: Journal,
        *,
        pace: Pace | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        on_verified: Callable[[Delivery], None] | None = None,
    ) -> None:
        self.deliveries = list(deliveries)
        self.fetcher, self.places, self.journal = fetcher, places, journal
        self.pace = pace or Pace()
        self.repairs: list[Repair] = []
        self._on_progress = on_progress or (lambda progress: None)
        self._on_verified = on_verified or (lambda delivery: None)
        self._changed = threading.Condition()
        self._spans: deque[tuple[Delivery, int, int]] = deque()
        self._unflushed: list[tuple[Delivery, int, int]] = []
        self._ended = threading.Event()
        self._unverified: deque[Delivery] = deque()
        self._error: BaseException | None = None
        self._working = 0
        total = sum(d.file.size for d in self.deliveries)
        self._progress = Progress(total, files=len(self.deliveries))

    def run(self) -> None:
        """Fetch what is missing, verify every file, and mend what does not verify.

        Raises:
            HashMismatch: if a file's bytes, fetched again, still do not have the hash that the source
                announces.
            KeyboardInterrupt: as it came, after what had arrived was flushed and recorded.
            SwiftletError: whatever stopped a stream; what had arrived is recorded.
        """
        self._spans.extend(self._missing())
        left = sum(stop - start for _, start, stop in self._spans)
        self._progress = replace(self._progress, done_bytes=self._progress.total_bytes - left)
        self._unverified.extend(self.deliveries)
        jobs = [self._fetch_spans] * min(self.pace.streams, len(self._spans)) + [self._verify] * VERIFIERS
        self._working = len(jobs)
        flusher = threading.Thread(target=self._flush_often, daemon=True)
        flusher.start()
        threads = [threading.Thread(target=self._guard, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            while self._working:
                with self._changed:
                    self._changed.wait(0.1)
                    moment = self._progress
                self._on_progress(moment)
        except BaseException:
            self.fetcher.cancel.set()
            raise
        finally:
            deadline = time.monotonic() + JOIN_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            self._ended.set()
            flusher.join()
        if self._error is not None:
            raise self._error
        self._on_progress(self._progress)

    def count_retry(self, retry: Retry) -> None:
        """Let the fetcher's `on_retry` point here, and progress shows its waits."""
        self._add(retries=1)
        self._update(last_retry=retry)

    # -- streams ------------------------------------------------------------------------------------

    def _missing(self) -> Iterator[tuple[Delivery, int, int]]:
        for delivery in self.deliveries:
            name, size = delivery.file.name, delivery.file.size
            holes = self.journal.missing(name, size)
            if holes and not self.fetcher.ranged:
                holes = [(holes[0][0], size)]  # each request is answered from byte 0: make it one request
            step = self.pace.span_bytes if self.fetcher.ranged else max(size, 1)
            for start, stop in holes:
                for at in range(start, stop, step):
                    yield delivery, at, min(at + step, stop)

    def _guard(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            with self._changed:
                if self._error is None and not (isinstance(error, Cancelled) and self.fetcher.cancel.is_set()):
                    self._error = error
            self.fetcher.cancel.set()
        finally:
            with self._changed:
                self._working -= 1
                if not self._working and self._error is None and self.fetcher.cancel.is_set():
                    self._error = Cancelled("stopped; repeat the same command to continue")
                self._changed.notify_all()

    def _fetch_spans(self) -> None:
        while not self.fetcher.cancel.is_set():
            with self._changed:
                if not self._spans:
                    return
                delivery, start, stop = self._spans.popleft()
                while not self.fetcher.ranged and self._spans and self._spans[0][:2] == (delivery, stop):
                    stop = self._spans.popleft()[2]  # ranges are ignored: one request for all that follows
            self._update(current=delivery.file.name)
            stream = _Stream(self, delivery, start)
            try:
                self.fetcher.stream(delivery.file, start, stop, stream.sink)
            finally:
                stream.flush()

    def _record(self, delivery: Delivery, start: int, stop: int) -> None:
        self.journal.wrote(delivery.file.name, start, stop)
        with self._changed:
            self._unflushed.append((delivery, start, stop))
            self._changed.notify_all()

    def _flush_often(self) -> None:
        """Flush what was written since the last time, then record it as done; once more at the end."""
        last = False
        while not last:
            begin = time.monotonic()
            while not (last := self._ended.wait(0.05)) and time.monotonic() - begin < SYNC_SECONDS:
                with self._changed:
                    if sum(stop - start for _, start, stop in self._unflushed) >= SYNC_BYTES:
                        break
            with self._changed:
                batch, self._unflushed = self._unflushed, []
            try:
                targets = {p.target for d, start, stop in batch for p in d.route.pieces(start, stop)}
                self.places.sync(targets)
                self.journal.done(*((d.file.name, start, stop) for d, start, stop in batch))
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                self.fetcher.cancel.set()
                return

    def _update(self, **fields: Any) -> None:
        with self._changed:
            self._progress = replace(self._progress, **fields)

    def _add(self, **amounts: int) -> None:
        with self._changed:
            now = {name: getattr(self._progress, name) + amount for name, amount in amounts.items()}
            self._progress = replace(self._progress, **now)

    # -- verification -------------------------------------------------------------------------------

    def _verify(self) -> None:
        while True:
            with self._changed:
                if not self._unverified:
                    return
                delivery = self._unverified.popleft()
            if delivery.file.name not in self.journal.verified and not self._verify_file(delivery):
                return
            self._on_verified(delivery)
            self._add(verified_files=1)

    def _verify_file(self, delivery: Delivery) -> bool:
        """Hash a file as its bytes come in; False if everything stops before the last."""
        file = delivery.file
        hashes, at = FileHashes(file.size, sha256=file.sha256, git_oid=file.git_oid), 0
        while at < file.size:
            stop = self.journal.covered_to(file.name, at)
            if stop == at:
                with self._changed:
                    if self.fetcher.cancel.is_set():
                        return False
                    self._changed.wait(0.1)
                continue
            for block in self.places.read(delivery.route, at, stop):
                hashes.update(block)
                at += len(block)
                self._add(hashed_bytes=len(block))
                if self.fetcher.cancel.is_set():
                    return False
        if not hashes.fit():
            hashes = self._mend(delivery)
        self.places.sync(delivery.route.targets())
        self.journal.done((file.name, 0, file.size))
        self.journal.mark_verified(file.name, hashes.sha256.hexdigest())
        return True

    def _mend(self, delivery: Delivery) -> FileHashes:
        """Fetch a file again piece by piece, compare with what is on disk, rewrite what differs, until the
        hash fits.

        A hash says that a file is wrong, not where; so the pieces before the wrong one travel again, but
        nothing is written except the bytes that differ, and nothing after the last wrong piece is fetched.
        """
        file, repairs = delivery.file, list[Repair]()
        right = FileHashes(file.size, sha256=file.sha256, git_oid=file.git_oid)
        for start in range(0, file.size, REPAIR_BYTES):
            stop = min(start + REPAIR_BYTES, file.size)
            again = bytearray()
            self.fetcher.stream(file, start, stop, lambda at, block, into=again: into.extend(block))  # type: ignore[misc]
            right.update(again)
            wrong = self._rewrite(delivery, start, again)
            if wrong is None:
                continue
            repairs.append(wrong)
            self.repairs.append(wrong)
            if len(repairs) & (len(repairs) - 1) == 0:  # after 1, 2, 4, ... repairs: is the rest right as it is?
                whole = right.copy()
                for block in self.places.read(delivery.route, stop, file.size):
                    whole.update(block)
                if whole.fit():
                    return whole
        if right.fit():
            return right
        where = ", ".join(f"{r.start}-{r.stop - 1}" for r in repairs)
        raise HashMismatch(
            f"{file.name}: the bytes that the source sends do not have the hash it announces "
            f"({file.sha256 or file.git_oid})"
            + (f"; bytes {where} differed when fetched again" if where else "; the same bytes came twice")
            + ". The file at the source is damaged: try another source, or the same command later"
        )

    def _rewrite(self, delivery: Delivery, start: int, right: bytearray) -> Repair | None:
        """Replace what differs on disk from `right`; the bounds of the difference, or None."""
        here = b"".join(self.places.read(delivery.route, start, start + len(right)))
        if here == right:
            return None
        first = _common(lambda n: here[:n] == right[:n], len(here))
        last = len(here) - _common(lambda n: here[len(here) - n :] == right[len(here) - n :], len(here))
        self.places.write(delivery.route, start + first, bytes(right[first:last]))
        pieces = delivery.route.pieces(start + first, start + last)
        self.places.sync({piece.target for piece in pieces})
        return Repair(delivery.file.name, start + first, start + last)


class _Stream:
    """Writes one span's blocks and records them when enough has gathered."""

    def __init__(self, transfer: Transfer, delivery: Delivery, start: int) -> None:
        self._transfer, self._delivery = transfer, delivery
        self._start = self._at = start
        self._due = time.monotonic() + transfer.pace.record_seconds

    def sink(self, at: int, block: bytes) -> None:
        self._transfer.places.write(self._delivery.route, at, block)
        self._at = at + len(block)
        self._transfer._add(done_bytes=len(block), fetched_bytes=len(block))
        if self._at - self._start >= self._transfer.pace.record_bytes or time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        if self._at > self._start:
            self._transfer._record(self._delivery, self._start, self._at)
            self._start = self._at
        self._due = time.monotonic() + self._transfer.pace.record_seconds


def _common(equal: Callable[[int], bool], size: int) -> int:
    """The largest n up to `size` for which `equal(n)` holds, given that it holds up to some n and then no
    more."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if equal(middle) else (low, middle - 1)
    return low
