"""Byte ranges of remote files over HTTP, whatever the line does: retried, resumed in place, checked, never
guessed.

Knows URLs, redirects, connections and waiting; what an answer means is in answers.py; not hubs, tensors or disks. Uses
the HTTP client that huggingface_hub brings, so proxies, certificates, offline mode and a client factory set there
count here too.
Invariants: a byte handed to a sink is the byte at that offset of the file that was announced (size and
validator are compared on every answer; content is the caller's to hash), bytes arrive in order without gaps,
and credentials go to the source's own origin only, never to where it redirects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TypeVar

import httpcore2
import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import OfflineModeIsEnabled

from swiftlet_mlx.errors import Cancelled, NetworkFailed, SourceBroken, SourceNotFound

from .answers import Body, Location, announced, check_body, check_linked, next_url, same_origin
from .origin import Origin, RemoteFile, shown
from .patience import Patience, Retry, Tries, TryAgain

MAX_REDIRECTS = 8
BLOCK_BYTES = 1 << 20  # what comes in pieces of 16 to 64 kB is handed on in such blocks: each costs Python's time
BLOCK_SECONDS = 0.05  # but what a slow line brings is handed on soon: a kill costs what was not
DIRECT_BYTES = 4 << 20  # a body from which a connection of its own, a few round trips, is worth it
Sink = Callable[[int, bytes], None]
T = TypeVar("T")


class Fetcher:
    """Fetches ranges of one source's files. Safe to use from several threads at once.

    Args:
        origin: the source.
        patience: time limits and waits.
        cancel: set from outside to make every call raise `Cancelled` at its next byte or wait.
        on_retry: told about each wait, from the thread that waits.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        patience: Patience | None = None,
        cancel: threading.Event | None = None,
        on_retry: Callable[[Retry], None] | None = None,
    ) -> None:
        self.origin = origin
        self.patience = patience or Patience()
        self.cancel = cancel or threading.Event()
        self.ranged = True  # False once the source answered a range with a whole file
        self._on_retry = on_retry or (lambda retry: None)
        self._locations: dict[str, Location] = {}
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._contact = False

    def stream(self, file: RemoteFile, start: int, stop: int, sink: Sink) -> None:
        """Deliver bytes `[start, stop)` of `file` to `sink(offset, block)` in order, over as many requests as
        it takes.

        Raises:
            NetworkFailed: if nothing arrives for longer than `patience` allows.
            SourceChanged: if the file's size or validator is no longer what was announced.
            SourceBroken: if the source insists on a web page, a short file or an impossible range.
            Cancelled: if `cancel` was set.
            SwiftletError: whatever `origin.refusal` makes of a final refusal, and whatever `sink` raises.
        """
        if not 0 <= start <= stop <= file.size:
            raise ValueError(f"{file.name}: bytes {start} to {stop} of {file.size}")
        at, tries = start, Tries(self.patience)
        while at < stop:
            self._check_cancel()
            try:
                with closing(self._attempt(file, at, stop)) as blocks:
                    for block in blocks:
                        sink(at, block)
                        at += len(block)
                        tries.progress()
            except TryAgain as failure:
                wait = tries.failed(failure, file.name, at, contact=self._contact)
                self._wait(file.name, failure, wait)

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of `file` in memory; the caller bounds how many. Raises what `stream`
        raises."""
        parts: list[bytes] = []
        self.stream(file, start, stop, lambda at, block: parts.append(block))
        return b"".join(parts)

    def probe(self, name: str, url: str) -> RemoteFile | None:
        """Size and validator of a file, or None if the source says it does not exist (404).

        Raises:
            NetworkFailed, SourceBroken, Cancelled: as `stream`.
            SwiftletError: for a refusal other than 404.
        """
        return self.retrying(name, lambda: self._probe(name, url))

    def retrying(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt()`, called again with the same waits while it raises `TryAgain`.

        Raises:
            NetworkFailed: when it is time to give up; or the `wrong` of the last `TryAgain`.
            Cancelled: if `cancel` was set.
        """
        tries = Tries(self.patience)
        while True:
            self._check_cancel()
            try:
                result = attempt()
                self._contact = True
                return result
            except TryAgain as failure:
                self._wait(what, failure, tries.failed(failure, what, 0, contact=self._contact))

    # -- one attempt -------------------------------------------------------------------------------

    def _attempt(self, file: RemoteFile, at: int, stop: int) -> Generator[bytes, None, None]:
        """The bytes of one request, gathered into blocks; what arrived before it failed is given out first."""
        parts: list[bytes] = []
        gathered, left, due = 0, stop - at, 0.0
        try:
            with self._open(file, at, stop) as (response, body), _transport_errors():
                skip = at - body.starts_at
                for part in _parts(response, body.length, self.patience.stall_seconds):
                    self._check_cancel()
                    if skip:
                        dropped = min(skip, len(part))
                        part, skip = part[dropped:], skip - dropped
                    if not part:
                        continue
                    if not left:
                        return  # more than was asked for: this connection is given up
                    now = time.monotonic()
                    if not parts:
                        due = now + BLOCK_SECONDS
                    self._contact = True
                    part = part[:left]
                    parts.append(part)
                    gathered, left = gathered + len(part), left - len(part)
                    if gathered >= BLOCK_BYTES or not left or now >= due:
                        block, parts, gathered = b"".join(parts), [], 0
                        yield block
            if left:
                raise TryAgain(f"the connection closed {left} bytes early")
        except (TryAgain, Cancelled):
            if parts:
                yield b"".join(parts)
            if left:
                raise

    @contextmanager
    def _open(self, file: RemoteFile, at: int, stop: int) -> Iterator[tuple[httpx2.Response, Body]]:
        """An answer whose body begins at byte `at` (206) or at byte 0 (200) of the announced file."""
        with self._lock:
            location = self._locations.get(file.name)
        fresh = location is None
        if location is None:
            location = Location(file.url, file.etag)
        for _ in range(MAX_REDIRECTS):
            headers = {"Range": f"bytes={at}-{stop - 1}"}
            if location.etag and not location.etag.startswith("W/"):
                headers["If-Range"] = location.etag
            response = self._send("GET", location.url, headers)
            try:
                if not response.has_redirect_location:
                    body = self._judge(file, location, response, (at, stop), fresh=fresh)
                    yield response, body
                    return
                check_linked(file, response.headers)
                location = Location(next_url(file.name, location.url, response.headers["Location"]), None)
            finally:
                response.close()
        raise SourceBroken(f"{file.name}: {shown(file.url)} redirects in a circle")

    def _judge(
        self, file: RemoteFile, location: Location, response: httpx2.Response, wanted: tuple[int, int], *, fresh: bool
    ) -> Body:
        try:
            body = check_body(file, location, response.status_code, response.headers, wanted, self.origin, fresh=fresh)
        except TryAgain as failure:
            with self._lock:
                known = self._locations.get(file.name)
                if failure.stale and known and known.url == location.url:  # another stream may have renewed it already
                    del self._locations[file.name]
            raise
        with self._lock:
            self._locations[file.name] = Location(location.url, location.etag or body.etag)
        if body.ignored_range:
            self.ranged = False
        return body

    def _probe(self, name: str, url: str) -> RemoteFile | None:
        target = url
        for _ in range(MAX_REDIRECTS):
            # A range, not HEAD: signed addresses are good for one method, and some static hosts refuse HEAD.
            response = self._send("GET", target, {"Range": "bytes=0-0"})
            try:
                if response.has_redirect_location:
                    target = next_url(name, target, response.headers["Location"])
                    continue
                file = announced(name, url, response.status_code, response.headers, self.origin)
                if file is not None:
                    self._contact = True
                    self.ranged = self.ranged and (response.status_code != 200 or file.size <= 1)
                return file
            finally:
                response.close()
        raise SourceBroken(f"{name}: {shown(url)} redirects in a circle")

    def _send(self, method: str, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        client: httpx2.Client = get_session()
        every = {"Accept-Encoding": "identity", **headers}
        if same_origin(url, self.origin.home):
            every.update(self.origin.credentials())
        timeout = httpx2.Timeout(
            self.patience.stall_seconds,
            connect=self.patience.connect_seconds,
            pool=self.patience.stall_seconds,
        )
        with _transport_errors():
            request = client.build_request(method, url, headers=every, timeout=timeout)
            return client.send(request, stream=True, follow_redirects=False)

    # -- waiting -----------------------------------------------------------------------------------

    def _check_cancel(self) -> None:
        if self.cancel.is_set():
            raise Cancelled("stopped; repeat the same command to continue")

    def _wait(self, what: str, failure: TryAgain, seconds: float) -> None:
        """Sleep before the next attempt; when the server itself asked for quiet, every stream keeps it."""
        now = time.monotonic()
        with self._lock:
            if failure.retry_after is not None:
                self._quiet_until = max(self._quiet_until, now + seconds)
            seconds = max(seconds, self._quiet_until - now)
        self._on_retry(Retry(what, failure.reason, seconds))
        if self.cancel.wait(seconds):
            self._check_cancel()


def _parts(response: httpx2.Response, length: int, timeout: float) -> Iterator[bytes]:
    """The body of an answer, in order, in pieces as they come.

    Each byte is copied five times on its way through the client, in pieces of 64 kB. So a long body of known length is
    read from the connection itself, as soon as the client has given out what it had read along with the headers. Such a
    connection serves no other request; short bodies, and all that is not plain HTTP/1.1, therefore take the common way.
    """
    stream, parts = response.extensions.get("network_stream"), response.iter_raw()
    if (
        length < DIRECT_BYTES
        or stream is None
        or response.extensions.get("http_version") != b"HTTP/1.1"
        or response.headers.get("Content-Length") != str(length)
        or "Transfer-Encoding" in response.headers
    ):
        yield from parts
        return
    part = next(parts, b"")
    while part:
        yield part
        length -= len(part)
        part = stream.read(min(length, BLOCK_BYTES), timeout) if length > 0 else b""


@contextmanager
def _transport_errors() -> Iterator[None]:
    """Sort what the HTTP client raises into what may heal and what will not."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise NetworkFailed(
            "HF_HUB_OFFLINE is set, so nothing can be fetched. Unset it, or give a model that is already "
            "here (see `swiftlet-mlx list`)"
        ) from None
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise SourceNotFound(f"not an address that can be fetched: {error}") from None
    except httpx2.ProxyError as error:
        raise NetworkFailed(f"the proxy refused: {error}. Check HTTPS_PROXY, HTTP_PROXY and NO_PROXY") from None
    except (httpx2.TimeoutException, httpcore2.TimeoutException) as error:
        raise TryAgain(f"no answer in time ({type(error).__name__})") from None
    except (httpx2.TransportError, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise NetworkFailed(
                f"the server's certificate cannot be verified: {error}. Behind a company proxy, set "
                "SSL_CERT_FILE to its certificate"
            ) from None
        raise TryAgain(f"{type(error).__name__}: {error}".rstrip(": ")) from None
