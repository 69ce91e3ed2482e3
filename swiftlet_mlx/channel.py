"""A queue from one writing thread to one reader, who may wait in a thread or in an asyncio loop.

Knows nothing of what it carries. Invariant: items arrive in order; after `end` the reader gets what is left,
then the error if there is one, then the end of iteration, for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Channel(Generic[T]):
    """Unbounded, because a reply is bounded and the writer must never wait for a slow reader."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._ended = False
        self._error: BaseException | None = None

    def put(self, item: T) -> None:
        """Append an item. Called by the writer."""
        with self._changed:
            self._items.append(item)
            self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come. The first call counts."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._wake()

    @property
    def ended(self) -> bool:
        """True once the writer has finished, though items may still wait to be read."""
        return self._ended

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            while not self._items and not self._ended:
                self._changed.wait()
            if self._items:
                return self._items.popleft()
            self._raise_error()
            raise StopIteration

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            with self._changed:
                if self._items:
                    return self._items.popleft()
                if self._ended:
                    self._raise_error()
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                woken = loop.create_future()
                self._waiter = (loop, woken)
            await woken

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wake(self) -> None:
        self._changed.notify_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, woken = waiter
            try:
                loop.call_soon_threadsafe(_set, woken)
            except RuntimeError:
                pass  # the loop is closed: its reader has gone, and the writer must not suffer for it


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # the reader may have been cancelled meanwhile
        woken.set_result(None)
