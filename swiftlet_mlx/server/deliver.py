"""From a wish to an answer: replies are generated one after another and written whole or as they come.

Knows events, streams and clients that leave; the shapes of answers are a Dialect's. Invariants: when a client has
gone, its reply is cancelled at once, streaming or not; a stream always ends as its dialect says it must; whatever
fails here fails for one client.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from swiftlet_mlx.engine import Stream
from swiftlet_mlx.errors import SwiftletError
from swiftlet_mlx.events import (
    Event,
    Finish,
    Statistics,
    TextDelta,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
)

from .desk import Desk
from .failures import ApiError, dumps, from_library

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects chunks would undo streaming
]


# Events that are there already are written without a turn of the loop; after so many it must see closed connections,
# and other clients have their turn.
YIELD_EVERY = 8


class ClientGone(Exception):
    """The client has closed its connection. Nothing can be sent."""


@dataclass(slots=True)
class Answer:
    """One reply, collected from its events."""

    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    statistics: Statistics | None = None
    finish: Finish | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.text += event.text
            self.logprobs += event.logprobs
        elif isinstance(event, ThinkingDelta):
            self.thinking += event.text
        elif isinstance(event, ToolCall):
            self.calls.append(event)
        elif isinstance(event, Statistics):
            self.statistics = event
        elif isinstance(event, Finish):
            self.finish = event


class Writer(Protocol):
    """Writes one request's events in the frames of a dialect."""

    heartbeat: bytes

    def event(self, choice: int, event: Event) -> bytes:
        """The frames that an event makes; empty if it makes none. The Started of choice 0 comes first."""

    def end(self) -> bytes:
        """The frames after the last event."""

    def failed(self, error: ApiError) -> bytes:
        """The frames that tell of an error, the end included."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for, in no dialect.

    Args:
        starts: begin a reply each, in order; called on a worker thread.
        characters: how much text each has to read, about.
        whole: the body of an answer that is not streamed.
        writer: how to stream; None if the answer is wanted whole.
        one_call: end a reply after its first tool call.
    """

    starts: Sequence[Callable[[], Stream]]
    characters: int
    whole: Callable[[Sequence[Answer]], dict[str, Any]]
    writer: Writer | None = None
    one_call: bool = False


async def deliver(desk: Desk, wish: Wish, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body has been read.

    Raises:
        ApiError: it was refused or failed before anything was sent.
        ClientGone: there is nobody to answer.
    """
    with desk.admitted():
        async with _Watch(receive) as watch:
            if wish.writer is None:
                await _whole(desk, wish, watch, scope, send)
            else:
                await _stream(desk, wish, wish.writer, watch, scope, send)


# ---- the two ways of answering -----------------------------------------------------------------------------------


async def _whole(desk: Desk, wish: Wish, watch: _Watch, scope: Scope, send: Send) -> None:
    answers = []
    for start in wish.starts:
        answer = Answer()
        async for event in _events(desk, wish, start, watch, scope):
            answer.take(event)
        answers.append(answer)
    body = dumps(wish.whole(answers))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(desk: Desk, wish: Wish, writer: Writer, watch: _Watch, scope: Scope, send: Send) -> None:
    out = _Frames(send, writer.heartbeat, desk.settings.heartbeat_seconds)
    try:
        for choice, start in enumerate(wish.starts):
            async for event in _events(desk, wish, start, watch, scope):
                frames = writer.event(choice, event)
                if frames:
                    await out.write(frames)
        await out.write(writer.end(), last=True)
    except (ApiError, ClientGone) as error:
        if isinstance(error, ClientGone) or not out.begun:
            raise
        scope["state"]["failed"] = error
        await out.write(writer.failed(error), last=True)
    except Exception as error:  # a fault of this server: the client's stream must end all the same
        if not out.begun:
            raise
        scope["state"]["failed"] = error
        desk.say(one_line(error))
        await out.write(writer.failed(ApiError(500, "Internal error.", code="internal_error")), last=True)
    finally:
        out.close()


async def _events(
    desk: Desk, wish: Wish, start: Callable[[], Stream], watch: _Watch, scope: Scope
) -> AsyncIterator[Event]:
    """The events of one reply, up to its Finish.

    Raises:
        ApiError: it was refused or failed. ClientGone: nobody wants it any more.
    """
    stream = await desk.begin(start, wish.characters)
    try:
        watch.follow(stream)
        called = False
        async for event in stream:
            if isinstance(event, Statistics):
                desk.metrics.answered(event)
                scope["state"]["statistics"] = event
            elif isinstance(event, Finish) and event.reason == "cancelled":
                if called:
                    event = Finish("tool_calls")
                else:
                    raise (
                        ClientGone
                        if watch.gone
                        else ApiError(503, "The server is shutting down.", code="shutting_down")
                    )
            elif called and not isinstance(event, Finish):
                continue
            yield event
            if wish.one_call and isinstance(event, ToolCall):
                called = True
                stream.cancel()
    except SwiftletError as error:
        desk.say(one_line(error))
        raise from_library(error) from error
    finally:
        desk.end(stream)


def one_line(error: BaseException) -> str:
    """An error and its cause for the terminal, with the place if it is not one of the library's."""
    cause = error.__cause__
    text = f"{type(error).__name__}: {error}" + (f" (from {type(cause).__name__}: {cause})" if cause else "")
    if isinstance(error, SwiftletError):
        return text
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return text + "".join(f" < {f.name} ({f.filename.rpartition('/')[2]}:{f.lineno})" for f in reversed(frames))


# ---- the client --------------------------------------------------------------------------------------------------


class _Watch:
    """Notices that a client has left, and cancels what is being generated for it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._stream: Stream | None = None
        self.gone = False

    def follow(self, stream: Stream) -> None:
        self._stream = stream
        if self.gone:
            stream.cancel()

    async def __aenter__(self) -> _Watch:
        self._task = asyncio.create_task(self._wait())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _wait(self) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        self.gone = True
        if self._stream is not None:
            self._stream.cancel()


class _Frames:
    """A response of server-sent events, with signs of life when nothing has been sent for a while."""

    def __init__(self, send: Send, heartbeat: bytes, seconds: float | None) -> None:
        self._send = send
        self._heartbeat = heartbeat
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._writing = False
        self._written = 0
        self._beating = asyncio.create_task(self._beat()) if seconds is not None else None
        self.begun = False

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        self._writing = True
        try:
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            await self._send({"type": "http.response.body", "body": frames, "more_body": not last})
            self._written += 1
            if self._written % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        finally:
            self._writing = False
            self._last = self._loop.time()

    def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        assert self._seconds is not None
        while True:
            left = self._last + self._seconds - self._loop.time()
            if left > 0:
                await asyncio.sleep(left)
            elif self._writing:  # the client is slow, not the model
                await asyncio.sleep(self._seconds)
            else:
                await self.write(self._heartbeat)
