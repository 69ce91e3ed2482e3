"""How long to wait for a source, and when to give up. Clocks and chance only: no HTTP client, no threads.

Knows what failed and how often; not who is waiting. Invariant: whoever gives up says how to continue.
"""

from __future__ import annotations

import email.utils
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from swiftlet_mlx.errors import NetworkFailed, SwiftletError


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what. Waits double from `first_wait` to `longest_wait`, each shortened by up to
    half at random so that streams do not come back together; what a server asks for in Retry-After comes
    first."""

    stall_seconds: float = 30.0  # no byte for this long: the connection is taken for dead
    connect_seconds: float = 15.0
    first_wait: float = 1.0
    longest_wait: float = 60.0
    give_up_seconds: float = 600.0  # a laptop lid or a rebooting router, not a day
    first_contact_tries: int = 4  # nothing ever arrived: probably no network, so say so soon
    wrong_answer_tries: int = 4  # web pages, expired addresses, short files: they rarely heal
    longest_retry_after: float = 900.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Told to `on_retry` before each wait."""

    file: str
    reason: str
    seconds: float


class TryAgain(Exception):
    """This attempt failed in a way that the next may not.

    Args:
        reason: in words, for whoever watches.
        retry_after: seconds that the server asked for; every stream then waits.
        wrong: the error to raise if this keeps happening although the server answers.
        renew: only an address has aged; the first such failure in a row costs no wait.
        stale: the address that was asked is not to be asked again.
    """

    def __init__(
        self,
        reason: str,
        *,
        retry_after: float | None = None,
        wrong: SwiftletError | None = None,
        renew: bool = False,
        stale: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason, self.retry_after, self.wrong = reason, retry_after, wrong
        self.renew, self.stale = renew, stale


class Tries:
    """Attempts of one stream since its last byte."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.progress()

    def progress(self) -> None:
        self._count = self._wrong = 0
        self._since = time.monotonic()

    def failed(self, failure: TryAgain, name: str, at: int, *, contact: bool) -> float:
        """Seconds to wait before the next attempt; raises when it is time to give up."""
        limits = self._patience
        self._count += 1
        if failure.wrong is not None:
            self._wrong += 1
            if self._wrong >= limits.wrong_answer_tries:
                raise failure.wrong
        if failure.retry_after is not None and failure.retry_after > limits.longest_retry_after:
            raise NetworkFailed(
                f"{name}: the server asks to come back in {failure.retry_after:.0f} seconds. "
                "Repeat the same command then; it continues where it stopped"
            )
        waited = time.monotonic() - self._since
        hopeless = not contact and self._count >= limits.first_contact_tries
        if hopeless or (waited > limits.give_up_seconds and self._count >= limits.first_contact_tries):
            raise NetworkFailed(
                f"{name}: nothing arrived at byte {at} after {self._count} attempts in {waited:.0f} seconds "
                f"({failure.reason}). Check the network and repeat the same command; it continues where it "
                "stopped"
            )
        if failure.renew and self._count == 1:
            return 0.0
        wait = min(limits.longest_wait, limits.first_wait * float(1 << min(self._count - 1, 20)))
        wait *= random.uniform(0.5, 1.0)
        return wait if failure.retry_after is None else failure.retry_after + wait / 2


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds a server asks to wait: Retry-After in seconds or as a date, else the reset time of a spent rate
    limit."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    if value:
        until, now = _moment(value), _moment(headers.get("Date", ""))
        return None if until is None else max(0.0, until - (time.time() if now is None else now))
    spent = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("RateLimit", ""))
    return float(spent[1]) if spent else None


def _moment(date: str) -> float | None:
    """Seconds since 1970 of a date in a header. Compare two of one server: this clock may be off."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
