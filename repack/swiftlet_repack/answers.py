"""What an answer to a range request means: the bytes that were asked for, a fault that may heal, or an end.

Knows status codes and headers; opens no connection, waits for nothing, keeps nothing. Invariant: an answer passes only
if its range, size and validator are those of the file that was announced; what is wrong with it otherwise is said as
`TryAgain` where asking again may help, and as the error for the user where it will not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from swiftlet_mlx.errors import SourceBroken, SourceChanged, SwiftletError

from .origin import Origin, RemoteFile, shown
from .patience import TryAgain, retry_after

BUSY = (408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524)
EXPIRED = (400, 401, 403, 404, 410)  # what storage hosts answer when a signed address is no longer good
SMALL_BYTES = 64 * 1024
POINTER_SIZES = range(124, 141)  # three short lines: a fixed text, a sha256 and a size


@dataclass(frozen=True, slots=True)
class Location:
    """Where a file's bytes are served at the moment; `etag` is the validator seen there."""

    url: str
    etag: str | None


@dataclass(frozen=True, slots=True)
class Body:
    """An answer that passed: which bytes of the file its body holds, and whether the source ignored the range."""

    starts_at: int
    length: int
    etag: str | None
    ignored_range: bool


def check_body(
    file: RemoteFile,
    location: Location,
    status: int,
    headers: Mapping[str, str],
    wanted: tuple[int, int],
    origin: Origin,
    *,
    fresh: bool,
) -> Body:
    """Judge the answer to a request for the bytes `wanted` of a file.

    Args:
        file: As announced.
        location: Where was asked.
        status: Of the answer, not a redirect.
        headers: Of the answer.
        wanted: First byte and the one after the last.
        origin: Says what a refusal means.
        fresh: The address was handed out a moment ago.

    Raises:
        TryAgain: it may heal; `stale` if the address should not be used again.
        SourceChanged: the file is no longer the one that was announced.
        SwiftletError: what the origin makes of a final refusal.
    """
    at, stop = wanted
    direct = location.url == file.url
    if status in BUSY:
        raise TryAgain(f"the server answered {status}", retry_after=retry_after(headers))
    if status in EXPIRED and not direct:
        # An address handed out a moment ago that is refused is counted; one that has aged is simply renewed.
        refusal = origin.refusal(status, headers, file.name) if fresh else None
        raise TryAgain("its storage address is no longer good", wrong=refusal, renew=not fresh, stale=True)
    if status == 416:
        total = total_size(headers)
        wrong = _size_error(file, total) if total not in (None, file.size) else _no_bytes(file, at, stop)
        raise TryAgain("the server has no such bytes", wrong=wrong, stale=True)
    if status not in (200, 206):
        raise origin.refusal(status, headers, file.name)
    if is_web_page(headers) and not file.name.endswith((".html", ".htm")):
        raise TryAgain("a web page came instead of the file", wrong=_web_page(file), stale=True)
    check_linked(file, headers)
    if headers.get("Content-Encoding", "identity") != "identity":
        raise TryAgain("the server compresses what it was asked to send as it is", wrong=_encoded(file))
    etag = validator(headers)
    if location.etag and etag and etag != location.etag:
        if direct:
            raise SourceChanged(
                f"{file.name}: the source replaced this file during the installation (validator "
                f"{location.etag} became {etag}). Repeat the command with --restart to install the new "
                "one"
            )
        raise TryAgain("its storage address serves another object now", stale=True)
    if status == 206:
        _check_range(file, headers, at, stop)
        return Body(at, stop - at, etag, ignored_range=False)
    length = headers.get("Content-Length", "")
    if length.isdigit() and int(length) != file.size:
        raise TryAgain("the file has another size", wrong=_size_error(file, int(length)), stale=True)
    # hubs may answer small texts whole
    return Body(0, file.size, etag, ignored_range=stop - at < file.size and file.size > SMALL_BYTES)


def announced(name: str, url: str, status: int, headers: Mapping[str, str], origin: Origin) -> RemoteFile | None:
    """The file that the answer to a request for one byte speaks of; None if there is none.

    Raises:
        TryAgain, SourceBroken, SwiftletError: as `check_body`.
    """
    if status == 404:
        return None
    if status in BUSY:
        raise TryAgain(f"the server answered {status}", retry_after=retry_after(headers))
    if status not in (200, 206, 416):
        raise origin.refusal(status, headers, name)
    if is_web_page(headers) and status != 416:
        page = SourceBroken(f"{name}: {shown(url)} answers with a web page instead of the file")
        raise TryAgain("a web page came instead of the file", wrong=page)
    length = headers.get("Content-Length", "")
    size = total_size(headers)
    if size is None and status == 200 and length.isdigit():
        size = int(length)
    if size is None:
        raise SourceBroken(f"{name}: {shown(url)} does not say how large it is; a static host is needed")
    return RemoteFile(name, url, size, etag=validator(headers))


def next_url(name: str, url: str, target: str) -> str:
    """Where a redirect leads, unless it gives up encryption.

    Raises:
        SourceBroken: if it does.
    """
    target = urljoin(url, target)
    if url.startswith("https:") and not target.startswith("https:"):
        raise SourceBroken(f"{name}: {shown(url)} redirects to an address without encryption; it is not followed")
    return target


def check_linked(file: RemoteFile, headers: Mapping[str, str]) -> None:
    """A hub announces hash and size of a stored file on its redirect: they must be those of the pinned commit.

    Raises:
        SourceChanged, SourceBroken: if they are not.
    """
    linked = headers.get("X-Linked-Etag", "").strip('"')
    if linked and file.sha256 and re.fullmatch(r"[0-9a-f]{64}", linked) and linked != file.sha256:
        raise SourceChanged(
            f"{file.name}: the source announces another file now (sha256 {linked[:12]}… instead of "
            f"{file.sha256[:12]}…). Repeat the command with --restart to install the new one"
        )
    size = headers.get("X-Linked-Size", "")
    if size.isdigit() and int(size) != file.size:
        raise _size_error(file, int(size))


def validator(headers: Mapping[str, str]) -> str | None:
    """What tells this version of a file from another, if the server says."""
    return headers.get("ETag") or headers.get("Last-Modified")


def total_size(headers: Mapping[str, str]) -> int | None:
    """The size of the whole file from Content-Range, if it is there."""
    match = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", headers.get("Content-Range", "").strip())
    return int(match[1]) if match else None


def is_web_page(headers: Mapping[str, str]) -> bool:
    """Whether a page came, as a network that wants a login sends for everything."""
    return "html" in headers.get("Content-Type", "")


def same_origin(one: str, other: str) -> bool:
    """Whether what may be told to one address may be told to the other."""

    def origin(url: str) -> tuple[str, str | None, int | None]:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)

    return origin(one) == origin(other)


def _check_range(file: RemoteFile, headers: Mapping[str, str], at: int, stop: int) -> None:
    given = headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", given)
    if match is None or int(match[1]) != at or int(match[2]) >= max(stop, at + 1):
        raise TryAgain(
            "the server sent other bytes than asked for",
            wrong=SourceBroken(f"{file.name}: asked for bytes {at}-{stop - 1}, the server answered {given!r}"),
        )
    if match[3] != "*" and int(match[3]) != file.size:
        raise TryAgain("the file has another size", wrong=_size_error(file, int(match[3])), stale=True)


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
        f"{file.name}: {shown(file.url)} answers with a web page instead of the file. A network that wants a login "
        "does that; open a browser, sign in, and repeat the same command"
    )


def _encoded(file: RemoteFile) -> SourceBroken:
    return SourceBroken(f"{file.name}: {shown(file.url)} is sent compressed; a static host must send files as they are")
