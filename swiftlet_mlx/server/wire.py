"""HTTP on the wire: uvicorn's h11 protocol with the time limits it lacks.

Knows connections; no requests. Invariant: a connection that neither sends a request nor takes its answer is
closed after a bounded time, so that idle clients cannot use the server up.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .failures import ApiError
from .settings import Settings


def protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The protocol class for these settings."""

    class Protocol(_Bounded):
        header_seconds = settings.header_seconds
        stall_seconds = settings.stall_seconds
        max_connections = settings.max_connections

    return Protocol


class _Bounded(H11Protocol):
    """One connection."""

    header_seconds: float
    stall_seconds: float
    max_connections: int
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._header_timer = self.loop.call_later(self.header_seconds, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer = _stopped(self._header_timer)
        self._stall_timer = _stopped(self._stall_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # SEND_BODY and later: the header is complete. IDLE: one is on its way, the first or another one.
        if self.conn.their_state is not h11.IDLE:
            self._header_timer = _stopped(self._header_timer)
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self.header_seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stall_timer = _stopped(self._stall_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        error = ApiError(400, msg, code="invalid_http")
        body = bytes(error.response().body)
        headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            events: list[Any] = [h11.Response(status_code=400, headers=headers, reason=b"Bad Request")]
            for event in (*events, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is under way already; only closing is left
        self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Stop a timer; the result stands for having none."""
    if timer is not None:
        timer.cancel()
    return None
