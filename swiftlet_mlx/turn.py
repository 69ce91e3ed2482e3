"""One reply of a conversation on its way to its reader.

Knows a stream of events; what becomes of the conversation is for whoever is told the end. Invariant: the end is told
once, after every event has been noted, however the reply ended.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator

from .engine import Stream
from .events import Event, Finish, Statistics, TextDelta, ThinkingDelta, ToolCall


class Turn:
    """A reply on its way. Iterate it once, with `for` or `async for`; leaving the loop early cancels it.

    When the events have ended, however they did, the session's messages are up to date and `text`,
    `thinking`, `tool_calls`, `statistics` and `finish` say what came.
    """

    def __init__(self, stream: Stream, ended: Callable[[Turn], None]) -> None:
        self._stream = stream
        self._ended = ended
        self._error: BaseException | None = None
        self._cancelled = False
        self._reading = threading.Lock()
        self.text = ""
        self.thinking = ""
        self.tool_calls: list[ToolCall] = []
        self.statistics: Statistics | None = None
        self.finish: Finish | None = None

    def __iter__(self) -> Iterator[Event]:
        try:
            while (event := self._next()) is not None:
                yield event
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for event in self._stream:
                self._note(event)
                yield event
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self.cancel()
            async for event in self._stream:
                self._note(event)

    def cancel(self) -> None:
        """Ask for the end; the events go on to a Finish. From any thread."""
        self._cancelled = True
        self._stream.cancel()

    @property
    def ending(self) -> bool:
        """True once it has been cancelled or the engine has finished, though events may wait to be read."""
        return self._cancelled or self._stream.done

    def close(self) -> None:
        """Cancel what is left and wait until the engine has let go."""
        if self.done:
            return
        self.cancel()
        try:
            while self._next() is not None:
                pass
        except Exception as error:
            self._fail(error)

    def _next(self) -> Event | None:
        """The next event, noted. Two threads may be here (one that reads, one that closes): each event is noted in its
        place, and when either is told the end, all have been."""
        with self._reading:
            event = next(self._stream, None)
            if event is not None:
                self._note(event)
            return event

    @property
    def done(self) -> bool:
        """True once the reply is over and the session's messages hold it."""
        return self.finish is not None or self._error is not None

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.text += event.text
        elif isinstance(event, ThinkingDelta):
            self.thinking += event.text
        elif isinstance(event, ToolCall):
            self.tool_calls.append(event)
        elif isinstance(event, Statistics):
            self.statistics = event
        elif isinstance(event, Finish):
            self.finish = event
            self._ended(self)

    def _fail(self, error: BaseException) -> None:
        if not self.done:
            self._error = error
            self._ended(self)
