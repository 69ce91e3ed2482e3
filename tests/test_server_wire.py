"""What raw sockets can do to the server: anything but stop it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
from serving import USER, Served, scripted, serving, until

CHAT = json.dumps({"messages": USER}).encode()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = {"header_seconds": 0.5, "body_seconds": 0.5, "max_body_bytes": 10_000, "stall_seconds": 0.5}
    with serving(scripted("Hello world"), **limits) as running:
        yield running


@pytest.fixture(autouse=True)
def _the_next_client_is_served(served: Served) -> Iterator[None]:
    yield
    assert served.chat().json()["choices"][0]["message"]["content"] == "Hello world"
    assert served.get("/health").json()["in_flight"] == 0


def head(length: int | str | None, *more: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """The status and all bytes until the server closes or falls silent for a second."""
    sock.settimeout(1)
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except TimeoutError:
        pass
    except ConnectionError:
        pass
    return int(data.split(b" ", 2)[1]) if data else 0, data


def exchange(served: Served, *parts: bytes) -> tuple[int, bytes]:
    with served.connect() as sock:
        for part in parts:
            sock.sendall(part)
        return answer(sock)


def test_chunked_bodies_are_read(served: Served) -> None:
    half = len(CHAT) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (CHAT[:half], CHAT[half:]))
    status, _ = exchange(served, head(None, "Transfer-Encoding: chunked"), chunks, b"0\r\n\r\n")
    assert status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b"\xff\xfe{}",
        b'{"messages": "\xc3\x28"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN, "messages": []}',
        b'{"temperature": 1e999, "messages": []}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 4000 + b"]" * 4000 + b"}",
        b"[" * 9000,
        b"messages=Hi",
        b"\x00" * 100,
    ],
)
def test_bodies_that_are_no_json_object_are_refused(served: Served, body: bytes) -> None:
    status, data = exchange(served, head(len(body)), body)
    assert status == 400
    assert json.loads(data.split(b"\r\n\r\n", 1)[1])["error"]["message"]


def test_an_emoji_in_escapes_is_read(served: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\udc4d"}]}'
    assert exchange(served, head(len(body)), body)[0] == 200


@pytest.mark.parametrize("extra", [1, 30_000])
def test_a_body_beyond_the_limit_is_refused(served: Served, extra: int) -> None:
    body = b'{"messages": "' + b"x" * (10_000 + extra) + b'"}'
    status, data = exchange(served, head(len(body)), body)
    assert status == 413
    assert b"request_too_large" in data


def test_a_body_announced_too_large_is_refused_before_it_comes(served: Served) -> None:
    start = time.perf_counter()
    status, _ = exchange(served, head(10**15))
    assert status == 413
    assert time.perf_counter() - start < 0.9


def test_an_endless_chunked_body_is_cut(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(head(None, "Transfer-Encoding: chunked"))
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        with pytest.raises(OSError):  # noqa: PT012  (whichever send it is)
            for _ in range(100_000):
                sock.sendall(chunk)


def test_a_truncated_body_is_no_request(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(head(len(CHAT)) + CHAT[:10])
    until(lambda: served.server.desk.in_flight == 0)


def test_a_body_that_dribbles_is_told_so(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(head(len(CHAT)) + CHAT[:5])
        status, data = answer(sock)
    assert status == 408
    assert b"body_timeout" in data


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_a_header_that_dribbles_is_cut_off(served: Served, begun: bytes) -> None:
    with served.connect() as sock:
        sock.sendall(begun)
        start = time.perf_counter()
        assert answer(sock)[1] == b""
        assert time.perf_counter() - start < 0.95


def test_a_second_header_that_dribbles_is_cut_off(served: Served) -> None:
    with served.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = b""
        while b'"version"' not in data:
            data += sock.recv(4096)
        sock.sendall(b"GET /heal")
        start = time.perf_counter()
        assert answer(sock)[1] == b""
        assert time.perf_counter() - start < 0.95


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # a TLS hello
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"\xff" * 1000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_as_json(served: Served, data: bytes) -> None:
    status, got = exchange(served, data)
    assert status == 400
    assert json.loads(got.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_huge_header_is_refused(served: Served, end: bytes) -> None:
    status, data = exchange(served, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + end)
    assert status in (400, 431), data


def test_pipelined_requests_are_answered_in_turn(served: Served) -> None:
    last = head(len(CHAT)) + CHAT
    kept = last.replace(b"Connection: close\r\n", b"")
    status, data = exchange(served, kept * 2 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + last)
    assert status == 200
    assert data.count(b"HTTP/1.1 200 OK") == 4
    assert data.count(b"Hello world") == 3


def test_an_upgrade_is_not_taken(served: Served) -> None:
    websocket = "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13"
    assert exchange(served, f"GET /health HTTP/1.1\r\nHost: localhost\r\n{websocket}\r\n\r\n".encode())[0] == 200


def test_a_client_that_does_not_read_is_cut_off() -> None:
    reply = "the quick brown fox jumps over the lazy dog. " * 10
    with serving(scripted(reply), stall_seconds=0.3, send_buffer=4096) as served, socket.socket() as sock:
        body = json.dumps({"messages": USER, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", served.port))
        sock.sendall(head(len(body)) + body)
        until(lambda: served.server.desk.metrics.abandoned == 1)
        until(lambda: served.server.desk.in_flight == 0)
        assert served.chat(max_tokens=1).status_code == 200


def test_bodies_together_are_bounded() -> None:
    with serving(scripted("Hello"), max_body_bytes=10_000, max_bodies_bytes=12_000) as served:
        first = served.connect()
        first.sendall(head(9_000) + b" " * 8_000)
        until(lambda: served.server.desk.bodies._held == 8_000)
        status, data = exchange(served, head(9_000), b" " * 9_000)
        assert status == 503
        assert b"too_many_bodies" in data
        first.close()
        until(lambda: served.server.desk.bodies._held == 0)
        assert served.chat().status_code == 200


def test_more_connections_than_may_be_are_closed() -> None:
    with serving(scripted("Hello"), max_connections=5) as served:
        socks = [served.connect() for _ in range(5)]
        time.sleep(0.1)
        with served.connect() as one_more:
            assert answer(one_more)[1] == b""
        for sock in socks:
            sock.close()
        until(lambda: not served.server.server_state.connections)
        assert served.chat().status_code == 200
