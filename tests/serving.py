"""A server in this process, on a free port, with a scripted model: for the server's tests.

Knows talkers' models; the server is the real one, on a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn.server
from talkers import Scripted, tokenizer

from swiftlet_mlx.engine import Engine
from swiftlet_mlx.server.process import Server, listen, serve, url
from swiftlet_mlx.server.settings import Settings

# One for all, since making one loads certificates; no connection is kept, for servers come and go.
CLIENT = httpx.Client(timeout=30, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
USER = [{"role": "user", "content": "Hi"}]


class _Sooner:
    """asyncio for uvicorn, which looks round ten times a second: a fifth of a second for each of 130 servers to end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


vars(uvicorn.server)["asyncio"] = _Sooner()


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    engine: Engine
    server: Server
    said: list[str]

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return CLIENT.post(self.url + path, json=body, **options)

    def chat(self, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": USER, **body})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return CLIENT.get(self.url + path, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """The data of a stream's events, `[DONE]` as text."""
        if "chat" in path:
            body.setdefault("messages", USER)
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.text)


def events(text: str) -> list[Any]:
    """Data of server-sent events; every event must be framed rightly."""
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        data = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
        if data:
            assert len(data) == 1
            found.append(data[0] if data[0] == "[DONE]" else json.loads(data[0]))
    return found


def scripted(
    *replies: str | list[int],
    template: str | None = None,
    xml: bool = False,
    context: int = 4096,
    on_step: Callable[[int], object] | None = None,
) -> Callable[[], tuple[Any, Any]]:
    """What an engine loads: a model that says these texts or ids, one reply after another."""
    words = tokenizer(template, xml=xml)
    scripts = [words.encode(r, add_special_tokens=False) if isinstance(r, str) else r for r in replies]
    model = Scripted(scripts, eos=words.convert_tokens_to_ids("<|im_end|>"), context=context, on_step=on_step)
    return lambda: (model, words)


@contextmanager
def serving(
    load: Callable[[], tuple[Any, Any]], *, wait: bool = True, send_buffer: int = 0, **settings: Any
) -> Iterator[Served]:
    """Run a server until the block ends."""
    said: list[str] = []
    ready = threading.Event()
    servers: list[Server] = []
    engine_options = {k: settings.pop(k) for k in ("prefill", "prefix_cache_gb") if k in settings}
    sock = listen("127.0.0.1", 0)
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # accepted sockets inherit it
    where, port = url(sock), sock.getsockname()[1]
    with Engine(load, **{"prefix_cache_gb": 0.01, **engine_options}) as engine:
        thread = threading.Thread(
            target=serve,
            args=(engine, Settings(model_id="tiny", **settings), sock),
            kwargs={"say": said.append, "ready": lambda _: ready.set(), "started": servers.append},
        )
        thread.start()
        try:
            assert not wait or ready.wait(20)
            until(lambda: bool(servers))
            yield Served(where, port, engine, servers[0], said)
        finally:
            until(lambda: bool(servers))
            servers[0].should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait for something; how long it took."""
    start = time.perf_counter()
    while not true():
        assert time.perf_counter() - start < seconds, "it did not happen"
        time.sleep(0.005)
    return time.perf_counter() - start


def joined(chunks: Sequence[Any], field: str = "content") -> str:
    """The text of a stream's deltas."""
    return "".join(c["choices"][0]["delta"].get(field) or "" for c in chunks if c != "[DONE]" and c["choices"])
