"""Bring every byte of a source's files to its place on disk, several ranges at once, and prove that it is
there.

Knows deliveries (a remote file and where its bytes go), streams and hashes; not hubs, tensors or terminals.
What is hashed is what is read back from the places, in source order, so a hash that fits vouches for the
network, for the scattering and for the disk. Invariant: a range is recorded in the journal only after its
bytes were written, and as done only after they were flushed. A file is recorded as verified only after all of it, as it
lies on disk, had the hash that the source announced.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from swiftlet_mlx.errors import Cancelled

from .delivery import Delivery, Repair
from .fetch import Fetcher
from .flush import Flusher
from .hashing import FileHashes
from .journal import Journal
from .mend import mend
from .pace import Pace
from .places import Places

VERIFIERS = 2  # files hashed at once: one hash runs at 1 to 2 GB/s
HASH_BYTES = 1 << 20  # read back at a time: stays in a core's cache between the read and the hash
LOOK_BYTES = 16 << 20  # hashed between two looks at what has come
AHEAD_BYTES = 64 << 20  # how far the hashes may be behind before a stream waits for them
JOIN_SECONDS = 5.0  # a stream that waits for the network when everything stops is left to end by itself
WATCH_SECONDS = 0.1


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
    phase: Literal["fetching", "hashing"] = "fetching"


class Transfer:
    """One run over a set of deliveries; make a new one to try again.

    Args:
        deliveries: in the order in which they should be fetched.
        fetcher: whose `cancel` event also stops this transfer.
        places, journal: opened by the caller, who closes them after `run` has returned.
        pace: streams and sizes.
        on_progress: called about ten times a second from the thread that calls `run`.
        on_verified: called for each file that is verified, now or by an earlier run, from another thread.
        again: verify also what an earlier run has verified: for files that are about to be read and believed.
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
        again: bool = False,
    ) -> None:
        self.deliveries = list(deliveries)
        self.fetcher, self.places, self.journal = fetcher, places, journal
        self.pace = pace or Pace()
        self.repairs: list[Repair] = []
        self._on_progress = on_progress or (lambda progress: None)
        self._on_verified = on_verified or (lambda delivery: None)
        self._again = again
        self._changed = threading.Condition()
        self._spans: deque[tuple[Delivery, int, int]] = deque()
        self._flusher = Flusher(places, journal, self._fail)
        self._idle = threading.Event()
        self._unverified: deque[Delivery] = deque()
        self._behind: dict[str, int] = {}  # bytes of a file that are in place and not hashed yet
        self._error: BaseException | None = None
        self._working = self._to_begin = self._passing = 0
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
        self._to_begin, self._passing = left, sum(d.passing_bytes for d in self.deliveries)
        self._unverified.extend(self.deliveries)
        jobs = [self._fetch_spans] * min(self.pace.streams, len(self._spans)) + [self._verify] * VERIFIERS
        self._working = len(jobs)
        self._flusher.start()
        threads = [threading.Thread(target=self._guard, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            while not self._idle.wait(WATCH_SECONDS):
                self._on_progress(self._progress)
        except BaseException:
            self.fetcher.cancel.set()
            raise
        finally:
            deadline = time.monotonic() + JOIN_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            self._flusher.finish()
        if self._error is not None:
            raise self._error
        self._on_progress(self._progress)

    def count_retry(self) -> None:
        """Let the fetcher's `on_retry` lead here, and progress counts its waits."""
        self._add(retries=1)

    # -- streams ------------------------------------------------------------------------------------

    def _missing(self) -> Iterator[tuple[Delivery, int, int]]:
        holes = [(d, self.journal.missing(d.file.name, d.file.size)) for d in self.deliveries]
        left = sum(stop - start for _, gaps in holes for start, stop in gaps)
        for delivery, gaps in holes:
            left -= sum(stop - start for start, stop in gaps)
            if self.fetcher.ranged:
                yield from ((delivery, start, stop) for start, stop in self.pace.cut(gaps, left))
            elif gaps:  # each request is answered from byte 0: make it one request
                yield delivery, gaps[0][0], delivery.file.size

    def _guard(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            if isinstance(error, Cancelled) and self.fetcher.cancel.is_set():
                return
            self._fail(error)
        finally:
            with self._changed:
                self._working -= 1
                if not self._working:
                    self._idle.set()
                if not self._working and self._error is None and self.fetcher.cancel.is_set():
                    self._error = Cancelled("stopped; repeat the same command to continue")
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
        self.fetcher.cancel.set()

    def _fetch_spans(self) -> None:
        while not self.fetcher.cancel.is_set():
            with self._changed:
                if not self._spans:
                    return
                if not self._has_place(*self._spans[0]):
                    self._changed.wait(0.1)
                    continue
                delivery, start, stop = self._spans.popleft()
                while not self.fetcher.ranged and self._spans and self._spans[0][:2] == (delivery, stop):
                    stop = self._spans.popleft()[2]  # ranges are ignored: one request for all that follows
                self._to_begin -= stop - start
            self._update(current=delivery.file.name)
            self._keep_pace()
            stream = _Stream(self, delivery, start)
            try:
                self.fetcher.stream(delivery.file, start, stop, stream.sink)
            finally:
                stream.flush()

    def _has_place(self, delivery: Delivery, start: int, stop: int) -> bool:
        """Whether a span can be written without the disk holding more than the finished files: what only passes
        through, and is not verified yet, lies in the place of what has not begun."""
        return delivery.passing_bytes > 0 or self._passing <= self._to_begin - (stop - start)

    def _keep_pace(self) -> None:
        """Wait while the hashes are far behind: what is left to hash when the last byte has come is time lost.

        Only this run's bytes count, and only such as could be hashed now: neither what an earlier run left to hash
        nor a stream that stands still keeps the others waiting.
        """
        with self._changed:
            while not self.fetcher.cancel.is_set():
                ahead = self._progress.fetched_bytes - self._progress.hashed_bytes
                if min(ahead, sum(self._behind.values())) <= AHEAD_BYTES:
                    return
                self._changed.wait(0.02)

    def _record(self, delivery: Delivery, start: int, stop: int) -> None:
        self._flusher.wrote(delivery, start, stop)
        with self._changed:
            self._changed.notify_all()

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
            known = delivery.file.name in self.journal.verified and not self._again
            if not known and not self._verify_file(delivery):
                return
            self._on_verified(delivery)
            with self._changed:
                self._passing -= delivery.passing_bytes
                self._changed.notify_all()
            self._add(verified_files=1)

    def _verify_file(self, delivery: Delivery) -> bool:
        """Hash a file as its bytes come in; False if everything stops before the last."""
        file = delivery.file
        hashes, at = FileHashes(file.size, sha256=file.sha256, git_oid=file.git_oid), 0
        buffer = memoryview(bytearray(min(HASH_BYTES, max(file.size, 1))))
        while at < file.size:
            behind = self.journal.covered_to(file.name, at) - at
            with self._changed:
                self._behind[file.name] = behind
                if not behind:
                    if self.fetcher.cancel.is_set():
                        return False
                    self._changed.wait(0.1)
                    continue
            for block in self.places.blocks(delivery.route, at, at + min(behind, LOOK_BYTES), buffer):
                hashes.update(block)
                at += len(block)
                self._add(hashed_bytes=len(block))
                if self.fetcher.cancel.is_set():
                    return False
        with self._changed:
            self._behind.pop(file.name, None)
        if not hashes.fit():
            hashes = mend(delivery, self.fetcher, self.places, self.repairs.append)
        self.places.sync(delivery.route.targets())
        self.journal.done((file.name, 0, file.size))
        self.journal.mark_verified(file.name, hashes.sha256.hexdigest())
        return True


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
