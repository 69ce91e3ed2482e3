"""A model hub and a static mirror on loopback, real enough for huggingface_hub and for an installer's worst
days.

Knows: repositories with commits and refs, who may see them, the JSON and the headers a hub answers with, the
redirect to a storage host on another name and port with a signed query, byte ranges, and faults on demand.
Every request is recorded. Does not know: git, uploads, anything about what the files mean. Invariant: without
a fault, what is served is byte for byte what was put in, and a fault changes only the requests it names.

    python tests/loopback_hub.py FOLDER        serves each FOLDER/ORG/NAME as the repository ORG/NAME until
    stopped
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

Content = bytes | Path

_SEND_BYTES = 256 * 1024
_LOGIN_PAGE = b"<!DOCTYPE html><html><head><title>Sign in to the network</title></head><body>welcome</body></html>"


@dataclass
class Fault:
    """One way a server misbehaves, on the requests it matches.

    kind: ``drop`` (connection reset after `at` body bytes), ``close`` (the same, but orderly), ``stall``
    (silent for `value` seconds after `at` body bytes), ``corrupt`` (the byte at file offset `at` is flipped),
    ``status`` (answer `value`, with `headers`), ``no_range`` (ignores Range), ``etag`` (another ETag),
    ``html`` (a login page with status 200), ``pointer`` (the LFS pointer instead of the file), ``short`` (the
    file ends at offset `at`, and the server believes it).
    """

    kind: str
    match: str = "*"
    where: str = "any"  # "hub", "cdn", "api" or "any"
    times: int = -1  # how many requests it spoils; -1: all
    skip: int = 0  # how many matching requests pass first
    at: int = 0
    value: float = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """What one request asked and what it got; recorded before the answer is sent, so a client never outruns
    it."""

    where: str
    method: str
    path: str
    file: str | None
    range: str | None
    authorized: bool
    status: int
    body_bytes: int


@dataclass
class Stored:
    """One file of one commit, with the hashes a hub knows."""

    content: Content
    lfs: bool
    size: int = 0
    sha256: str = ""
    oid: str = ""

    def __post_init__(self) -> None:
        sha, git = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)
        self.size = self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)
        git.update(f"blob {self.size}\0".encode())
        for block in self.blocks(0, self.size):
            sha.update(block)
            git.update(block)
        self.sha256, self.oid = sha.hexdigest(), git.hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid

    def blocks(self, start: int, stop: int) -> Iterator[bytes]:
        if isinstance(self.content, bytes):
            for at in range(start, stop, _SEND_BYTES):
                yield self.content[at : min(at + _SEND_BYTES, stop)]
            return
        with self.content.open("rb") as stream:
            stream.seek(start)
            while start < stop and (block := stream.read(min(_SEND_BYTES, stop - start))):
                start += len(block)
                yield block


class Repo:
    """Commits of one repository; `push` makes a new one and moves the ref."""

    def __init__(self, name: str, *, private: bool = False, gated: bool = False) -> None:
        self.name, self.private, self.gated = name, private, gated
        self.commits: dict[str, dict[str, Stored]] = {}
        self.refs: dict[str, str] = {}

    def push(self, files: Mapping[str, Content], *, ref: str = "main", lfs: str = "*.safetensors *.bin") -> str:
        """Store a commit of exactly these files and return its id."""
        patterns = lfs.split()
        stored = {
            path: Stored(content, any(fnmatch.fnmatch(path, pattern) for pattern in patterns))
            for path, content in files.items()
        }
        seed = json.dumps([self.name, len(self.commits), {path: file.sha256 for path, file in stored.items()}])
        commit = hashlib.sha1(seed.encode(), usedforsecurity=False).hexdigest()
        self.commits[commit] = stored
        self.refs[ref] = commit
        return commit

    def find(self, revision: str) -> str | None:
        if revision in self.refs:
            return self.refs[revision]
        return revision if revision in self.commits else None


class LoopbackHub:
    """Two servers on loopback: the hub (127.0.0.1) and its storage host (localhost), and any number of
    mirrors.

    Args:
        token: the one token that may see private and gated repositories.
        bytes_per_second: speed limit of each connection; 0 is unlimited.
        signed_seconds: how long a signed storage address is good for.
    """

    def __init__(
        self, *, token: str = "hf_loopback", bytes_per_second: float = 0, signed_seconds: float = 3600
    ) -> None:
        self.token, self.bytes_per_second, self.signed_seconds = token, bytes_per_second, signed_seconds
        self.exact_names = False  # whether another letter case is another name, instead of redirected
        self.below = ""  # the path under which the hub answers, as behind a company's gateway
        self.repos: dict[str, Repo] = {}
        self.mirrors: dict[str, dict[str, Stored]] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.connections = 0
        self.signatures: dict[str, tuple[str, float, Stored]] = {}
        self.lock = threading.Lock()
        self._servers = [_Server(self, "hub"), _Server(self, "cdn")]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn(self) -> str:
        return f"http://localhost:{self._servers[1].server_port}"

    def __enter__(self) -> LoopbackHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def repo(self, name: str, files: Mapping[str, Content], **options: Any) -> Repo:
        """Add a repository with one commit on main."""
        repo = self.repos[name] = Repo(name, **options)
        repo.push(files)
        return repo

    def mirror(self, name: str, files: Mapping[str, Content]) -> str:
        """Serve files as a plain static folder; returns its address."""
        self.mirrors[name] = {path: Stored(content, lfs=False) for path, content in files.items()}
        return f"{self.endpoint}/mirror/{name}"

    def encrypt(self, key: Path, certificate: Path) -> str:
        """From now on the hub's own server speaks TLS; returns its address, by the name `localhost`."""
        server = self._servers[0]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        return f"https://localhost:{server.server_port}"

    def body_bytes(self, match: str = "*") -> int:
        """Bytes of file bodies sent for files that match."""
        with self.lock:
            return sum(r.body_bytes for r in self.requests if r.file and fnmatch.fnmatch(r.file, match))

    def forget(self) -> None:
        """Empty the record of requests and connections."""
        with self.lock:
            self.requests.clear()
            self.connections = 0

    def expire_signatures(self) -> None:
        """Make every storage address handed out so far worthless."""
        with self.lock:
            self.signatures.clear()

    def sign(self, path: str, stored: Stored) -> str:
        signature = secrets.token_hex(16)
        expires = time.monotonic() + self.signed_seconds
        with self.lock:
            self.signatures[signature] = (path, expires, stored)
        name = f"{stored.sha256[:2]}/{stored.sha256}"
        query = f"X-Amz-Expires={int(self.signed_seconds)}&X-Amz-Signature={signature}"
        return f"{self.cdn}/xet-bridge/{name}?{query}"

    def pick(self, kinds: str, where: str, file: str) -> Fault | None:
        """The first live fault of these kinds for this request; counts it as used."""
        with self.lock:
            for fault in self.faults:
                if fault.kind not in kinds.split() or fault.times == 0 or fault.where not in ("any", where):
                    continue
                if not fnmatch.fnmatch(file, fault.match):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= fault.times > 0
                return fault
        return None

    def flips(self, where: str, file: str, start: int, stop: int) -> list[int]:
        """File offsets in `[start, stop)` at which this answer is to be wrong; counts each fault as used."""
        with self.lock:
            live = [
                f
                for f in self.faults
                if f.kind == "corrupt" and f.times and f.where in ("any", where) and start <= f.at < stop
                if fnmatch.fnmatch(file, f.match)
            ]
            for fault in live:
                fault.times -= fault.times > 0
        return [fault.at for fault in live]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: LoopbackHub, where: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.where = hub, where

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that goes away is not an error here
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    _file: str | None = None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        with self.server.hub.lock:
            self.server.hub.connections += 1
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # -- answers -----------------------------------------------------------------------------------

    def _record(self, status: int) -> Request:
        request = Request(
            self.server.where,
            self.command,
            self.path,
            self._file,
            self.headers.get("Range"),
            "Authorization" in self.headers,
            status,
            body_bytes=0,
        )
        with self.server.hub.lock:
            self.server.hub.requests.append(request)
        return request

    def _answer(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self._record(status)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), "application/json; charset=utf-8")

    def _refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        extra = {"X-Error-Message": message, **(headers or {})}
        if code:
            extra["X-Error-Code"] = code
        self._answer(status, json.dumps({"error": message}).encode(), "application/json; charset=utf-8", extra)

    def _redirect(self, location: str, status: int, headers: Mapping[str, str]) -> None:
        body = f"Redirecting to {location}".encode()
        self._answer(status, body, "text/plain; charset=utf-8", {"Location": location, **headers})

    def _spoilt(self, where: str, file: str) -> bool:
        """Answer with a fault that replaces the whole answer, if there is one."""
        fault = self.server.hub.pick("status html", where, file)
        if fault is None:
            return False
        if fault.kind == "html":
            self._answer(200, _LOGIN_PAGE, "text/html; charset=utf-8")
        else:
            self._refuse(int(fault.value), "", f"fault {int(fault.value)}", fault.headers)
        return True

    # -- routes ------------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        self._file = None
        parts = urlsplit(self.path)
        if self.server.where == "hub" and self.server.hub.below:
            if not parts.path.startswith(self.server.hub.below + "/"):
                return self._refuse(404, "", "not behind this gateway")
            parts = parts._replace(path=parts.path.removeprefix(self.server.hub.below))
        path = unquote(parts.path)
        if self.server.where == "cdn":
            self._storage(parts.query)
        elif path == "/api/models":
            self._search(parse_qs(parts.query).get("search", [""])[0])
        elif path.startswith("/api/models/"):
            self._api(parts.path.removeprefix("/api/models/"), parts.query)  # a slash in a ref stays quoted
        elif path.startswith("/api/resolve-cache/models/"):
            org, name, commit, file = path.removeprefix("/api/resolve-cache/models/").split("/", 3)
            self._resolve(f"{org}/{name}", commit, file, cached=True)
        elif path.startswith("/mirror/"):
            name, _, file = path.removeprefix("/mirror/").partition("/")
            self._static(name, file)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", parts.path):
            self._resolve(match[1], match[2], unquote(match[3]), cached=False)
        else:
            self._refuse(404, "", "Sorry, we can't find the page you are looking for.")
        return None

    def _seen(self, name: str) -> Repo | None:
        """The repository, if this client may know that it exists; otherwise the answer is sent."""
        hub = self.server.hub
        header = self.headers.get("Authorization")
        trusted = header == f"Bearer {hub.token}"
        repo = next((r for key, r in hub.repos.items() if key.lower() == name.lower()), None)
        if header and not trusted and header.startswith("Bearer hf_wrong"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not trusted):
            if trusted:
                self._refuse(404, "RepoNotFound", "Repository not found")
            else:
                self._refuse(401, "RepoNotFound", "Invalid username or password.")
        elif repo.name != name and self.server.hub.exact_names:
            self._refuse(404 if trusted else 401, "RepoNotFound", "Repository not found")
        elif repo.name != name:
            self._redirect(self.path.replace(name, repo.name, 1), 307, {})
        else:
            return repo
        return None

    def _search(self, words: str) -> None:
        names = [r.name for r in self.server.hub.repos.values() if not r.private]
        found = [name for name in names if words.lower() in name.lower()]
        self._json([{"_id": "0" * 24, "id": name, "modelId": name, "private": False} for name in found])

    def _api(self, rest: str, query: str) -> None:
        match = re.fullmatch(r"([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", rest)
        if match is None:
            return self._refuse(404, "", "not found")
        if self._spoilt("api", match[1]):
            return None
        repo = self._seen(match[1])
        if repo is None:
            return None
        commit = repo.find(unquote(match[3]) if match[3] else "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {match[3]}")
        blobs = "blobs" in parse_qs(query)
        files = repo.commits[commit]
        if match[2] == "tree":
            return self._json([_tree_entry(path, stored) for path, stored in sorted(files.items())])
        return self._json(
            {
                "_id": "0" * 24,
                "id": repo.name,
                "modelId": repo.name,
                "author": repo.name.split("/")[0],
                "sha": commit,
                "private": repo.private,
                "gated": "auto" if repo.gated else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [_sibling(path, stored, blobs) for path, stored in sorted(files.items())],
            }
        )

    def _resolve(self, name: str, revision: str, file: str, *, cached: bool) -> None:
        hub = self.server.hub
        self._file = file
        if self._spoilt("hub", file):
            return
        repo = self._seen(name)
        if repo is None:
            return
        if repo.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            status = 403 if "Authorization" in self.headers else 401
            return self._refuse(status, "GatedRepo", f"Access to model {name} is restricted. Please log in.")
        commit = repo.find(unquote(revision))
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        stored = repo.commits[commit].get(file)
        known = {"X-Repo-Commit": commit}
        if stored is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", known)
        if not stored.lfs:
            if cached:
                return self._send(stored, "hub", known)
            target = f"{hub.below}/api/resolve-cache/models/{repo.name}/{commit}/{quote(file)}"
            return self._redirect(target, 307, known)
        if hub.pick("pointer", "hub", file):
            lines = ["version https://git-lfs.github.com/spec/v1", f"oid sha256:{stored.sha256}"]
            pointer = "\n".join([*lines, f"size {stored.size}", ""])
            return self._send(Stored(pointer.encode(), lfs=False), "hub", known)
        etag = hub.pick("etag", "hub", file)
        linked = "0" * 64 if etag else stored.sha256
        headers = {**known, "X-Linked-Etag": f'"{linked}"', "X-Linked-Size": str(stored.size)}
        self._redirect(hub.sign(file, stored), 302, headers)
        return None

    def _storage(self, query: str) -> None:
        hub = self.server.hub
        signature = parse_qs(query).get("X-Amz-Signature", [""])[0]
        with hub.lock:
            path, expires, stored = hub.signatures.get(signature, ("", 0.0, None))
        if stored is None or time.monotonic() > expires:
            return self._answer(403, b"<Error><Code>AccessDenied</Code></Error>", "application/xml")
        self._file = path
        if not self._spoilt("cdn", path):
            self._send(stored, "cdn", {"Content-Disposition": f'inline; filename="{path}";'})
        return None

    def _static(self, name: str, file: str) -> None:
        self._file = file
        if self._spoilt("hub", file):
            return
        stored = self.server.hub.mirrors.get(name, {}).get(file)
        if stored is None:
            self._answer(404, b"<html>404 Not Found</html>", "text/html")
        else:
            self._send(stored, "hub", {})

    # -- bytes -------------------------------------------------------------------------------------

    def _send(self, stored: Stored, where: str, headers: Mapping[str, str]) -> None:
        hub, file = self.server.hub, self._file or ""
        etag = f'"{stored.etag}"'
        if hub.pick("etag", where, file):
            etag = f'"{secrets.token_hex(20)}"'
        size = stored.size
        if short := hub.pick("short", where, file):
            size = min(size, short.at)
        wanted = self.headers.get("Range")
        if wanted and (hub.pick("no_range", where, file) or self.headers.get("If-Range", etag) != etag):
            wanted = None
        start, stop, status = 0, size, 200
        if wanted:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
            if match is None or int(match[1]) >= size:
                return self._answer(416, b"", "text/plain", {"Content-Range": f"bytes */{size}"})
            start, status = int(match[1]), 206
            stop = min(int(match[2]) + 1, size) if match[2] else size
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", etag)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        for name, value in headers.items():
            self.send_header(name, value)
        request = self._record(status)
        self.end_headers()
        if self.command != "HEAD":
            for block in self._spoil_body(stored, where, start, stop):
                request.body_bytes += len(block)
                self.wfile.write(block)
                if hub.bytes_per_second:
                    time.sleep(len(block) / hub.bytes_per_second)
        return None

    def _spoil_body(self, stored: Stored, where: str, start: int, stop: int) -> Iterator[bytes]:
        hub, file = self.server.hub, self._file or ""
        cut = hub.pick("drop close stall", where, file)
        flips = hub.flips(where, file, start, stop)
        at = start
        step = max(1, int(hub.bytes_per_second / 50)) if hub.bytes_per_second else _SEND_BYTES
        for whole in stored.blocks(start, stop):
            for first in range(0, len(whole), step):
                block = whole[first : first + step]
                for flip in flips:
                    if at <= flip < at + len(block):
                        block = block[: flip - at] + bytes([block[flip - at] ^ 0x10]) + block[flip - at + 1 :]
                if cut is not None and at - start + len(block) >= cut.at:
                    yield block[: max(0, cut.at - (at - start))]
                    self._cut(cut)
                    cut = None
                    continue
                at += len(block)
                yield block

    def _cut(self, fault: Fault) -> None:
        self.wfile.flush()
        if fault.kind == "stall":
            time.sleep(fault.value)
        self.close_connection = True
        if fault.kind == "drop":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        raise ConnectionResetError("fault")


def _lfs(stored: Stored) -> dict[str, Any]:
    return {"sha256": stored.sha256, "size": stored.size, "pointerSize": 135}


def _sibling(path: str, stored: Stored, blobs: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": path}
    if blobs:
        entry.update(size=stored.size, blobId=stored.oid)
        if stored.lfs:
            entry["lfs"] = _lfs(stored)
    return entry


def _tree_entry(path: str, stored: Stored) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": stored.oid, "size": stored.size, "path": path}
    if stored.lfs:
        entry["lfs"] = {"oid": stored.sha256, "size": stored.size, "pointerSize": 135}
    return entry


def folder_files(folder: Path) -> dict[str, Content]:
    """Every regular file under a folder, by its relative path."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def main() -> None:
    root = Path(sys.argv[1])
    with LoopbackHub(bytes_per_second=float(os.environ.get("LOOPBACK_BYTES_PER_SECOND", "0"))) as hub:
        for folder in sorted(root.glob("*/*")):
            if folder.is_dir():
                hub.repo(folder.relative_to(root).as_posix(), folder_files(folder))
        print(f"HF_ENDPOINT={hub.endpoint}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
