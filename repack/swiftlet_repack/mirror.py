"""A model on a static web host: a folder of files beside a `hashes.json`.

Knows one base address and two JSON files; no hub, no tensors, no disks. Invariant: only files that
`hashes.json` names are listed, each with its sha256, its size as the host states it, and the host's
validator, so that a file replaced in the middle of an installation is noticed before its bytes are mixed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from swiftlet_mlx.errors import (
    AccessDenied,
    NetworkFailed,
    OptionError,
    SourceBroken,
    SourceNotFound,
    SwiftletError,
)
from swiftlet_mlx.jsonfile import MAX_JSON_BYTES
from swiftlet_mlx.qpack import HASHES, MAX_FILES, safe_relative

from .fetch import Fetcher
from .hub import Listing
from .origin import RemoteFile, shown

LOOK_UPS = 4  # files asked about at once


class Mirror:
    """A folder on a web host, as an origin of files.

    Args:
        url: address of the folder; a user name and password in it are sent to that host only, and shown
            nowhere.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise OptionError(f"--from-url is not the address of a web folder: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"{shown(url)!r} is not the address of a web folder; it begins with https:// or http://")
        self._login = ""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._login = "Basic " + base64.b64encode(pair).decode()
        host = parts.netloc.rpartition("@")[2]
        self._query = parts.query
        self.revision = None
        self.home = urlunsplit((parts.scheme, host, parts.path.rstrip("/") + "/", "", ""))

    @property
    def name(self) -> str:
        return self.home

    def credentials(self) -> Mapping[str, str]:
        return {"Authorization": self._login} if self._login else {}

    def listing(self, fetcher: Fetcher, *, commit: str | None = None) -> Listing:
        """The files that the folder's `hashes.json` names, and that file itself.

        Args:
            commit: a static folder has none; it is there because a hub has.

        Raises:
            SourceNotFound: if there is no `hashes.json`, or a file it names is not there.
            SourceBroken: if `hashes.json` is not one.
        """
        table, hashes = self._hashes(fetcher)
        names = [name for name in hashes if name != HASHES]
        with ThreadPoolExecutor(LOOK_UPS) as pool:
            try:
                found = dict(zip(names, pool.map(lambda name: self._probe(fetcher, name), names), strict=True))
            except BaseException:
                fetcher.cancel.set()
                raise
        files = {name: replace(file, sha256=hashes[name]) for name, file in found.items()}
        return Listing(self.home, None, {**files, HASHES: table})

    def _probe(self, fetcher: Fetcher, name: str) -> RemoteFile:
        found = fetcher.probe(name, self.address(name))
        if found is None:
            raise SourceNotFound(f"{self.home}: {HASHES} names {name}, which is not there; the copy is incomplete")
        return found

    def address(self, name: str) -> str:
        """Where a file of the folder is served."""
        return self.home + quote(name) + (f"?{self._query}" if self._query else "")

    def refusal(self, status: int, headers: Mapping[str, str], file: str) -> SwiftletError:
        if status in (401, 403):
            return AccessDenied(
                f"{file}: {self.home} may not be read (status {status}). If it needs a password, write it "
                "into the address: https://user:password@host/folder"
            )
        if status in (404, 410):
            return SourceNotFound(f"{file}: not at {self.home}; the copy there is incomplete")
        return NetworkFailed(f"{file}: {self.home} answered with status {status}; try again later")

    def _hashes(self, fetcher: Fetcher) -> tuple[RemoteFile, dict[str, str]]:
        found = fetcher.probe(HASHES, self.address(HASHES))
        if found is None:
            raise SourceNotFound(
                f"{self.home} has no {HASHES}, so nothing from there could be verified. Check the address; a "
                "container made by `swiftlet-mlx repack` carries one, copy the whole folder to the host"
            )
        if found.size > MAX_JSON_BYTES:
            raise SourceBroken(f"{self.home}: {HASHES} has {found.size} bytes, at most {MAX_JSON_BYTES} are possible")
        text = fetcher.read(found, 0, found.size)
        table = replace(found, sha256=hashlib.sha256(text).hexdigest())
        return table, parse_hashes(text, f"{self.home}: {HASHES}")


def parse_hashes(text: bytes, where: str) -> dict[str, str]:
    """Relative path to sha256 from the text of a `hashes.json`.

    Raises:
        SourceBroken: if it is not JSON of that form.
        UnsafePath: if a path in it would leave the folder.
    """
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceBroken(f"{where} is not JSON ({error})") from None
    table = value.get("files") if isinstance(value, dict) else None
    if not isinstance(table, dict) or not table or len(table) > MAX_FILES:
        raise SourceBroken(f"{where} has no usable table `files`")
    for name, digest in table.items():
        safe_relative(name, where)
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise SourceBroken(f"{where}: the hash of {name} is {digest!r}, 64 hexadecimal digits were expected")
    return dict(table)
