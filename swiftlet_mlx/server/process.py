"""A server process: a socket, uvicorn, signals, an orderly end.

Knows sockets and life cycles; no requests. Invariant: `serve` returns only after every client was answered or told,
or `drain_seconds` have passed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import EngineFailed, OptionError, SwiftletError

from .app import create_app
from .desk import Desk
from .guard import MAX_HEADER_BYTES
from .settings import Settings
from .wire import protocol

LAST_SECONDS = 5  # for telling clients that the server stops, after the time to drain
KEEP_ALIVE_SECONDS = 20


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OptionError: the address is not this machine's, or the port is taken.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise OptionError(f"--host {host} is no address of this machine: {error}") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise OptionError(
            f"cannot listen on {host} port {port}: {error.strerror}. Is a server running there already? "
            "Choose another with --port (0 takes any free one)"
        ) from None
    return sock


def url(sock: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    engine: Engine,
    settings: Settings,
    sock: socket.socket,
    *,
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
    ready: Callable[[Server], None] | None = None,
    started: Callable[[Server], None] | None = None,
) -> None:
    """Serve until a signal, or until `Server.should_exit` is set.

    Args:
        engine: may still be loading: /health says so meanwhile.
        settings: how to serve.
        sock: from `listen`; closed at the end.
        folder: the model's folder.
        say: takes lines for the person at the terminal.
        ready: called once the model can be asked.
        started: called with the server before it begins, to stop it from another thread.

    Raises:
        SwiftletError: the model could not be loaded.
    """
    server = Server(Desk(engine, settings, folder, say), ready)
    if started is not None:
        started(server)
    try:
        with _polite_end():
            server.run(sockets=[sock])
    finally:
        server.desk.close()
    if server.failure is not None:
        raise server.failure


class Server(uvicorn.Server):
    """uvicorn with a model that loads while it listens, and with a bounded, polite end."""

    def __init__(self, desk: Desk, ready: Callable[[Server], None] | None) -> None:
        settings = desk.settings
        super().__init__(
            uvicorn.Config(
                create_app(desk),
                loop="asyncio",
                http=protocol(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(settings.drain_seconds) + LAST_SECONDS,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )
        self.desk = desk
        self.failure: SwiftletError | None = None
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._opening = asyncio.create_task(self._open())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        end = loop.call_later(self.desk.settings.drain_seconds, self.desk.stop)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()
            self._opening.cancel()

    async def _open(self) -> None:
        try:
            await self.desk.open()
        except SwiftletError as error:
            cause = error.__cause__
            self.failure = cause if isinstance(error, EngineFailed) and isinstance(cause, SwiftletError) else error
            self.should_exit = True
            return
        if self._ready is not None:
            self._ready(self)


@contextmanager
def _polite_end() -> Iterator[None]:
    """uvicorn raises SIGTERM again once it has ended. With a handler that is no death, and the exit code stays 0."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
