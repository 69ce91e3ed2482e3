"""Make what a transfer has written survive a power cut, in a thread of its own so that no stream waits for the disk.

Knows places and the journal; not where bytes come from. Invariant: bytes are recorded as written after they were
written, and as done after they were flushed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .delivery import Delivery
from .journal import Journal
from .places import Places

SYNC_BYTES = 64 << 20  # how much may wait to be flushed: what a power cut can cost
SYNC_SECONDS = 5.0


class Flusher:
    """Flushes and records, from `start` to `finish`.

    Args:
        places, journal: as of the transfer.
        on_error: told what the disk or the journal refused; nothing is flushed after that.
    """

    def __init__(self, places: Places, journal: Journal, on_error: Callable[[BaseException], None]) -> None:
        self._places, self._journal, self._on_error = places, journal, on_error
        self._batch: list[tuple[Delivery, int, int]] = []
        self._waiting_bytes = 0
        self._due = threading.Condition()
        self._finished = False
        self._thread = threading.Thread(target=self._flush_often, daemon=True)

    def start(self) -> None:
        """Begin to flush what is told to `wrote`."""
        self._thread.start()

    def wrote(self, delivery: Delivery, start: int, stop: int) -> None:
        """Bytes `[start, stop)` of a file were written to their places."""
        self._journal.wrote(delivery.file.name, start, stop)
        with self._due:
            self._batch.append((delivery, start, stop))
            self._waiting_bytes += stop - start
            if self._waiting_bytes >= SYNC_BYTES:
                self._due.notify()

    def finish(self) -> None:
        """Flush the rest; all is recorded when this returns."""
        with self._due:
            self._finished = True
            self._due.notify()
        self._thread.join()

    def _flush_often(self) -> None:
        last = False
        while not last:
            due = time.monotonic() + SYNC_SECONDS
            with self._due:
                while not self._finished and self._waiting_bytes < SYNC_BYTES and (left := due - time.monotonic()) > 0:
                    self._due.wait(left)
                last = self._finished
                batch, self._batch, self._waiting_bytes = self._batch, [], 0
            try:
                self._places.sync({p.target for d, start, stop in batch for p in d.route.pieces(start, stop)})
                self._journal.done(*((d.file.name, start, stop) for d, start, stop in batch))
            except BaseException as error:
                self._on_error(error)
                return
