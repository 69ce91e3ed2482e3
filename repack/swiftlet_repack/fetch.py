"""Byte ranges of remote files over HTTP, whatever the line does: retried, resumed in place, checked, never
guessed.

Knows URLs, status codes, redirects, validators and waiting; not hubs, tensors or disks. Uses the HTTP client
that huggingface_hub brings, so proxies, certificates, offline mode and a client factory set there count here
too.
Invariants: a byte handed to a sink is the byte at that offset of the file that was announced (size and
validator are compared on every answer; content is the caller's to hash), bytes arrive in order without gaps,
and credentials go to the source's own origin only, never to where it redirects.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx2
from huggingface_hub import get_session
from huggingface_hub.errors import OfflineModeIsEnabled

from swiftlet_mlx.errors import (
    Cancelled,
    NetworkFailed,
    SourceBroken,
    SourceChanged,
    SourceNotFound,
    SwiftletError,
)

from .patience import Patience, Retry, Tries, TryAgain, retry_after

MAX_REDIRECTS = 8
BUSY = (408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524)
EXPIRED = (400, 401, 403, 404, 410)  # what storage hosts answer when a signed address is no longer good
SMALL_BYTES = 64 * 1024
POINTER_SIZES = range(124, 141)  # three short lines: a fixed text, a sha256 and a size
Sink = Callable[[int, bytes], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a source, as announced: its size, and whichever of its hashes and validators are known."""

    name: str
    url: str
    size: int
    sha256: str | None = None
    git_oid: str | None = None
    etag: str | None = None


class Origin(Protocol):
    """Where files come from: who may be told the token, and what a refusal means in words."""

    @property
    def home(self) -> str:
        """Any URL of the one origin that credentials are for."""

    def credentials(self) -> Mapping[str, str]:
        """Headers for `home` only."""

    def refusal(self, status: int, headers: Mapping[str, str], file: str) -> SwiftletError:
        """The error for an answer that will not get better by asking again."""


@dataclass(slots=True)
class _Location:
    """Where a file's bytes are served at the moment; `etag` is the validator seen there."""

    url: str
    etag: str | None


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
        self._locations: dict[str, _Location] = {}
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
                        self._check_cancel()
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
        with self._open(file, at, stop) as response:
            skip = 0 if response.status_code == 206 else at  # a whole file comes from its beginning
            left = stop - at
            with _transport_errors():
                for block in response.iter_raw():
                    if skip:
                        dropped = min(skip, len(block))
                        block, skip = block[dropped:], skip - dropped
                    if not block:
                        self._check_cancel()
                        continue
                    self._contact = True
                    block = block[:left]
                    yield block
                    left -= len(block)
                    if not left:
                        return
        raise TryAgain(f"the connection closed {left} bytes early")

    @contextmanager
    def _open(self, file: RemoteFile, at: int, stop: int) -> Iterator[httpx2.Response]:
        """An answer whose body begins at byte `at` (206) or at byte 0 (200) of the announced file."""
        with self._lock:
            location = self._locations.get(file.name)
        fresh = location is None
        if location is None:
            location = _Location(file.url, file.etag)
        headers = {"Range": f"bytes={at}-{stop - 1}"}
        if location.etag and not location.etag.startswith("W/"):
            headers["If-Range"] = location.etag
        for _ in range(MAX_REDIRECTS):
            response = self._send("GET", location.url, headers)
            try:
                if not response.has_redirect_location:
                    self._check_answer(file, location, response, at, stop, fresh)
                    with self._lock:
                        self._locations[file.name] = location
                    yield response
                    return
                _check_linked(file, response.headers)
                location = _Location(_next_url(file.name, location.url, response), None)
                headers.pop("If-Range", None)
            finally:
                response.close()
        raise SourceBroken(f"{file.name}: {file.url} redirects in a circle")

    def _check_answer(
        self,
        file: RemoteFile,
        location: _Location,
        response: httpx2.Response,
        at: int,
        stop: int,
        fresh: bool,
    ) -> None:
        status, headers = response.status_code, response.headers
        direct = location.url == file.url
        if status in BUSY:
            raise TryAgain(f"the server answered {status}", retry_after=retry_after(headers))
        if status in EXPIRED and not direct:
            self._forget(file, location)
            refusal = self.origin.refusal(status, headers, file.name)
            # An address handed out a moment ago that is refused is counted; one that has aged is simply
            # renewed.
            raise TryAgain("its storage address is no longer good", wrong=refusal if fresh else None, renew=not fresh)
        if status == 416:
            total = _total(headers.get("Content-Range", ""))
            self._forget(file, location)
            raise TryAgain(
                "the server has no such bytes",
                wrong=_size_error(file, total) if total not in (None, file.size) else _no_bytes(file, at, stop),
            )
        if status not in (200, 206):
            raise self.origin.refusal(status, headers, file.name)
        if "html" in headers.get("Content-Type", "") and not file.name.endswith((".html", ".htm")):
            self._forget(file, location)
            raise TryAgain("a web page came instead of the file", wrong=_web_page(file))
        _check_linked(file, headers)
        if headers.get("Content-Encoding", "identity") != "identity":
            raise TryAgain("the server compresses what it was asked to send as it is", wrong=_encoded(file))
        etag = _validator(headers)
        if location.etag and etag and etag != location.etag:
            self._forget(file, location)
            if direct:
                raise SourceChanged(
                    f"{file.name}: the source replaced this file during the installation (validator "
                    f"{location.etag} became {etag}). Repeat the command with --restart to install the new "
                    "one"
                )
            raise TryAgain("its storage address serves another object now")
        location.etag = location.etag or etag
        if status == 206:
            self._check_range(file, location, headers, at, stop)
        else:
            length = headers.get("Content-Length", "")
            if length.isdigit() and int(length) != file.size:
                self._forget(file, location)
                raise TryAgain("the file has another size", wrong=_size_error(file, int(length)))
            if stop - at < file.size and file.size > SMALL_BYTES:  # hubs may answer small texts whole
                self.ranged = False

    def _check_range(
        self, file: RemoteFile, location: _Location, headers: Mapping[str, str], at: int, stop: int
    ) -> None:
        given = headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", given)
        if match is None or int(match[1]) != at or int(match[2]) >= max(stop, at + 1):
            raise TryAgain(
                "the server sent other bytes than asked for",
                wrong=SourceBroken(f"{file.name}: asked for bytes {at}-{stop - 1}, the server answered {given!r}"),
            )
        if match[3] != "*" and int(match[3]) != file.size:
            self._forget(file, location)
            raise TryAgain("the file has another size", wrong=_size_error(file, int(match[3])))

    def _probe(self, name: str, url: str) -> RemoteFile | None:
        target = url
        for _ in range(MAX_REDIRECTS):
            # A range, not HEAD: signed addresses are good for one method, and some static hosts refuse HEAD.
            response = self._send("GET", target, {"Range": "bytes=0-0"})
            try:
                if response.has_redirect_location:
                    target = _next_url(name, target, response)
                    continue
                return self._announced(name, url, response)
            finally:
                response.close()
        raise SourceBroken(f"{name}: {url} redirects in a circle")

    def _announced(self, name: str, url: str, response: httpx2.Response) -> RemoteFile | None:
        status, headers = response.status_code, response.headers
        if status == 404:
            return None
        if status in BUSY:
            raise TryAgain(f"the server answered {status}", retry_after=retry_after(headers))
        if status not in (200, 206, 416):
            raise self.origin.refusal(status, headers, name)
        if "html" in headers.get("Content-Type", "") and status != 416:
            page = SourceBroken(f"{name}: {url} answers with a web page instead of the file")
            raise TryAgain("a web page came instead of the file", wrong=page)
        length = headers.get("Content-Length", "")
        size = _total(headers.get("Content-Range", ""))
        if size is None and status == 200 and length.isdigit():
            size = int(length)
            self.ranged = self.ranged and size <= 1
        if size is None:
            raise SourceBroken(f"{name}: {url} does not say how large it is; a static host is needed")
        self._contact = True
        return RemoteFile(name, url, size, etag=_validator(headers))

    def _send(self, method: str, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        client: httpx2.Client = get_session()
        every = {"Accept-Encoding": "identity", **headers}
        if _same_origin(url, self.origin.home):
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

    def _forget(self, file: RemoteFile, location: _Location) -> None:
        with self._lock:
            if self._locations.get(file.name) is location:  # another stream may have renewed it already
                del self._locations[file.name]

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
    except httpx2.TimeoutException as error:
        raise TryAgain(f"no answer in time ({type(error).__name__})") from None
    except httpx2.TransportError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise NetworkFailed(
                f"the server's certificate cannot be verified: {error}. Behind a company proxy, set "
                "SSL_CERT_FILE to its certificate"
            ) from None
        raise TryAgain(f"{type(error).__name__}: {error}".rstrip(": ")) from None


def _next_url(name: str, url: str, response: httpx2.Response) -> str:
    target = urljoin(url, response.headers["Location"])
    if url.startswith("https:") and not target.startswith("https:"):
        raise SourceBroken(f"{name}: {url} redirects to an address without encryption; it is not followed")
    return target


def _check_linked(file: RemoteFile, headers: Mapping[str, str]) -> None:
    """A hub announces hash and size of a stored file on its redirect: they must be those of the pinned
    commit."""
    linked = headers.get("X-Linked-Etag", "").strip('"')
    if linked and file.sha256 and re.fullmatch(r"[0-9a-f]{64}", linked) and linked != file.sha256:
        raise SourceChanged(
            f"{file.name}: the source announces another file now (sha256 {linked[:12]}… instead of "
            f"{file.sha256[:12]}…). Repeat the command with --restart to install the new one"
        )
    size = headers.get("X-Linked-Size", "")
    if size.isdigit() and int(size) != file.size:
        raise _size_error(file, int(size))


def _size_error(file: RemoteFile, found: int | None) -> SwiftletError:
    if found in POINTER_SIZES and file.size not in POINTER_SIZES:
        return SourceBroken(
            f"{file.name}: {found} bytes came instead of {file.size}; that is a Git LFS pointer, not the "
            "file. The copy there was made without `git lfs pull`: try another source"
        )
    if found is not None and found < file.size:
        return SourceBroken(
            f"{file.name}: the source has only {found} of {file.size} bytes; the file there is cut short. "
            "Try again later, or another source"
        )
    return SourceChanged(
        f"{file.name}: the source has {found} bytes now, {file.size} were announced. "
        "Repeat the command with --restart to install the new one"
    )


def _no_bytes(file: RemoteFile, at: int, stop: int) -> SourceBroken:
    return SourceBroken(f"{file.name}: the server refuses bytes {at}-{stop - 1} of {file.size}; try another source")


def _web_page(file: RemoteFile) -> SourceBroken:
    return SourceBroken(
        f"{file.name}: {file.url} answers with a web page instead of the file. A network that wants a login "
        "does that; open a browser, sign in, and repeat the same command"
    )


def _encoded(file: RemoteFile) -> SourceBroken:
    return SourceBroken(f"{file.name}: {file.url} is sent compressed; a static host must send files as they are")


def _validator(headers: Mapping[str, str]) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _total(content_range: str) -> int | None:
    match = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", content_range.strip())
    return int(match[1]) if match else None


def _same_origin(one: str, other: str) -> bool:
    def origin(url: str) -> tuple[str, str | None, int | None]:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)

    return origin(one) == origin(other)
