"""What all requests share: the engine, who may be served now, what runs, and the figures.

Knows the library and settings; no routes, no shapes of answers. Lives on the event loop's thread; what may take
long (templates, tokenizers) runs on worker threads. Invariant: every stream it hands out is cancelled when its
client leaves or the server stops, and at most `max_waiting` requests wait.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from swiftlet_mlx.completion import Completions
from swiftlet_mlx.engine import Engine, Stream
from swiftlet_mlx.errors import SwiftletError

from .asking import Conversation
from .body import Bodies
from .failures import ApiError, from_library
from .metrics import Metrics
from .settings import Settings

T = TypeVar("T")

WORKERS = 4  # threads for templates and tokenizers; one engine cannot use more prompts than they prepare
LONG_CHARACTERS = 200_000  # more take a tokenizer a second
MODEL_SHOWN = 100  # characters of an unknown model's name in the message


class Desk:
    """The server's state.

    Args:
        engine: may still be loading.
        settings: how to serve.
        folder: the model's folder.
        say: takes a line for the person at the terminal.
    """

    def __init__(
        self, engine: Engine, settings: Settings, folder: Path | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics()
        self.bodies = Bodies(settings)
        self.say = say or (lambda text: None)
        self.started = int(time.time())
        self.stopping = False
        self.in_flight = 0
        self._folder = folder
        self._completions: Completions | None = None
        self._failure: SwiftletError | None = None
        self._streams: set[Stream] = set()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="swiftlet-prompt")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="swiftlet-long-prompt")

    # ---- life

    async def open(self) -> None:
        """Wait for the model.

        Raises:
            SwiftletError: it could not be loaded, or its files contradict themselves.
        """
        try:
            await asyncio.wrap_future(self.engine.loaded)
            self._completions = await self.work(lambda: Completions(self.engine, self._folder))
        except SwiftletError as error:
            self._failure = error
            raise

    def stop(self) -> None:
        """End every reply that still runs; each client is told."""
        self.stopping = True
        for stream in list(self._streams):
            stream.cancel()

    def close(self) -> None:
        """Let go of the worker threads."""
        for workers in (self._workers, self._long):
            workers.shutdown(wait=False, cancel_futures=True)

    @property
    def health(self) -> str:
        """loading, ready, busy, failed or closed."""
        if self._failure is not None:
            return "failed"
        state = self.engine.state
        return "loading" if state in ("ready", "busy") and self._completions is None else state

    @property
    def completions(self) -> Completions:
        """The loaded model.

        Raises:
            ApiError: 503, it is not there.
        """
        if self._completions is not None:
            return self._completions
        if self._failure is not None:
            raise ApiError(503, "The model could not be loaded; see the server's messages.", code="model_failed")
        raise ApiError(503, "The model is being loaded.", code="model_loading", headers={"Retry-After": "2"})

    # ---- requests

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not this server's model. Names are compared, never looked up anywhere.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != "" and name not in self.settings.names:
            shown = name if len(name) <= MODEL_SHOWN else name[:MODEL_SHOWN] + "…"
            raise ApiError(
                404,
                f"The model {shown!r} is not served here; this server has {self.settings.model_id!r}. "
                "Ask for that one, or start the server with --alias NAME.",
                param="model",
                code="model_not_found",
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A place at the engine or in the queue.

        Raises:
            ApiError: 429, too many are waiting; 503, the server is stopping or has no model.
        """
        if self.stopping:
            raise ApiError(503, "The server is shutting down.", code="shutting_down")
        _ = self.completions
        waiting = self.in_flight - 1
        if waiting >= self.settings.max_waiting and self.in_flight:
            self.metrics.refused += 1
            again = max(1, min(120, round(self.metrics.reply_seconds * (waiting + 1))))
            raise ApiError(
                429,
                f"{waiting} requests are waiting, and {self.settings.max_waiting} may. Try again later.",
                code="queue_full",
                headers={"Retry-After": str(again)},
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def work(self, function: Callable[[], T], characters: int = 0) -> T:
        """Run something on a worker thread; with much text to read, on one where nothing short waits behind it."""
        workers = self._long if characters > LONG_CHARACTERS else self._workers
        return await asyncio.get_running_loop().run_in_executor(workers, function)

    async def prompt_ids(self, conversation: Conversation) -> list[int]:
        """The token ids of a conversation's prompt.

        Raises:
            ApiError: it cannot be written down.
        """
        completions = self.completions
        return await self.checked(lambda: conversation.ids(completions, self.settings), conversation.characters)

    async def checked(self, function: Callable[[], T], characters: int = 0) -> T:
        """Run something of the library's on a worker thread.

        Raises:
            ApiError: the library refused.
        """
        try:
            return await self.work(function, characters)
        except SwiftletError as error:
            raise from_library(error) from error

    async def begin(self, start: Callable[[], Stream], characters: int = 0) -> Stream:
        """Start a reply; `end` must follow.

        Raises:
            ApiError: it was refused.
        """
        stream = await self.checked(start, characters)
        self._streams.add(stream)
        if self.stopping:
            stream.cancel()
        return stream

    def memory(self) -> dict[str, int]:
        """Bytes in use: by the process, by MLX, by the experts' slots."""
        pools = getattr(self.engine.model, "pools", None)
        return {
            "resident_bytes": resident_bytes(),
            "mlx_active_bytes": mx.get_active_memory(),
            "mlx_cache_bytes": mx.get_cache_memory(),
            "expert_cache_bytes": pools.nbytes if pools is not None else 0,
        }

    def counters(self) -> dict[str, float]:
        """What streaming did since the start; empty for a model without streamed experts."""
        stats = getattr(getattr(self.engine.model, "pools", None), "stats", None)
        if stats is None:
            return {}
        return {
            "expert_hits": stats.hits,
            "expert_misses": stats.misses,
            "expert_evictions": stats.evictions,
            "expert_reads": stats.reads,
            "expert_read_bytes": stats.read_bytes,
            "expert_wait_seconds": stats.wait_seconds,
        }

    def end(self, stream: Stream) -> None:
        """The reply is over, or nobody wants it any more."""
        self._streams.discard(stream)
        if not stream.done:
            stream.cancel()


def resident_bytes() -> int:
    """Memory this process has resident; on systems without /proc the most it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS (not run here)
