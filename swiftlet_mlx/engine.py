"""A model on a thread of its own, for any number of callers: requests in, events out, in the order they came.

The one thread that touches MLX is worker.py's; this is what its callers hold. Knows threads and life cycles, no MLX.
Invariants: whoever drops the last reference cancels. The thread is joined before the interpreter goes, for MLX aborts
the process otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from . import thread
from .errors import OptionError
from .events import Event
from .generation import Prefill, Request
from .timeline import PrefixStore
from .worker import IDLE_SECONDS, Job, State, Worker

T = TypeVar("T")


class Stream:
    """The events of one request, to be iterated once, with `for` in any thread or `async for` in any loop.

    Iteration raises what the request failed with. Dropping the last reference cancels.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._job.events)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        return await self._job.events.__anext__()

    def cancel(self) -> None:
        """Ask for the end: the events go on to a Finish with reason `cancelled`. From any thread."""
        self._job.cancelled = True
        self._job.owner.tidy()

    @property
    def done(self) -> bool:
        """True once the engine has finished with this request, though events may wait to be read."""
        return self._job.events.ended

    def __del__(self) -> None:
        self._job.cancelled = True


class Engine:
    """Loads a model on its own thread and serves requests in order.

    Args:
        load: called once on the engine thread, returns (model, tokenizer) as `swiftlet_mlx.load` does.
        prefix_cache_gb: memory for past conversations, so that their next turn reads only what is new. 0
            keeps none.
        context_tokens: the longest prompt plus reply; None takes the model's own limit, if it states one.
        prefill_step_size: prompt tokens a pass.
        prefill: reads the prompt in its own way; None takes `swiftlet_mlx.prefill` for a model with streamed experts
            and pieces of `prefill_step_size` for any other.
        counters: f(model) -> the model's running counters, whose growth Statistics reports.
        max_waiting: how many requests may wait; None sets no bound.
        idle_seconds: how long nothing must have been asked before what is left to read of a reply as history is
            read, for its conversation's next turn; None never does. Any request interrupts it.

    The constructor returns at once; `wait()` or the `loaded` future tells when the model is there. Requests
    may be submitted before. Use it as a context manager, or call `close()`; at interpreter exit it closes
    itself.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Any, Any]],
        *,
        prefix_cache_gb: float | None = None,
        context_tokens: int | None = None,
        prefill_step_size: int = 2048,
        prefill: Prefill | None = None,
        counters: Callable[[Any], Mapping[str, int]] | None = None,
        max_waiting: int | None = None,
        idle_seconds: float | None = IDLE_SECONDS,
    ) -> None:
        if prefix_cache_gb is not None and not 0 <= prefix_cache_gb < 1e6:
            raise OptionError(f"prefix_cache_gb is {prefix_cache_gb}; it must be 0 or more.")
        if prefill_step_size < 1:
            raise OptionError(f"prefill_step_size is {prefill_step_size}; it must be 1 or more.")
        self._worker = Worker(
            load,
            None if prefix_cache_gb is None else int(prefix_cache_gb * 1e9),
            context_tokens,
            prefill_step_size,
            prefill,
            counters,
            max_waiting,
            idle_seconds,
        )
        self._run = thread.start(self._worker.run)
        # Also runs at interpreter exit, where a daemon thread inside MLX would abort the process.
        self._closer = weakref.finalize(self, _close, self._worker, self._run)

    def submit(self, request: Request) -> Stream:
        """Check a request and put it in the queue.

        Returns:
            Its events; generation begins when its turn comes, whether they are read or not.

        Raises:
            OptionError, ContextFull: the request cannot be served (while loading, the stream raises this
            instead). EngineBusy: too many are waiting. EngineClosed, EngineFailed: nobody is there to serve
            it.
        """
        return Stream(self._worker.submit(request))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread, in turn with the requests. For all that touches MLX."""
        return self._worker.call(function)

    def set_cache_gb(self, cache_gb: float) -> None:
        """Change the memory for a streamed model's experts: before the next token, without changing an answer.

        Args:
            cache_gb: GB (10^9 bytes). Less is really given back; below what the model needs, it gets what it needs.

        Raises:
            OptionError: for no size, or a model whose experts are not streamed.
        """
        pools = getattr(self._worker.model, "pools", None)
        if pools is None or not 0 < cache_gb < 1e6:
            raise OptionError(f"cache_gb {cache_gb} cannot be set: it must be a size, and the model a streamed one.")
        pools.ask_for(round(cache_gb * 1e9))
        self.call(pools.apply)  # if no request is running that would do it

    def wait(self, timeout: float | None = None) -> None:
        """Block until the model is loaded.

        Raises:
            EngineFailed: loading raised; the cause is chained.
            TimeoutError: it takes longer than `timeout` seconds.
        """
        self.loaded.result(timeout)

    @property
    def loaded(self) -> Future[None]:
        """Done when the model is loaded; holds EngineFailed if it could not be."""
        return self._worker.loaded

    @property
    def state(self) -> State:
        """loading, ready (idle), busy, failed (the model did not load) or closed."""
        return self._worker.state

    @property
    def waiting(self) -> int:
        """Requests in the queue, the running one not counted."""
        return self._worker.waiting

    @property
    def model(self) -> Any:
        """The model, once loaded. To be used on the engine thread only: see `call`."""
        return self._worker.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, once loaded. Holds no MLX; usable from any thread."""
        return self._worker.tokenizer

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt plus reply, once loaded; None if there is no known limit."""
        return self._worker.context_tokens

    def room(self, prompt_tokens: int, max_tokens: int) -> int:
        """How long a reply to a prompt of this length may be, at most `max_tokens`.

        Raises:
            ContextFull: not even one token.
        """
        return self._worker.room(prompt_tokens, max_tokens)

    @property
    def store(self) -> PrefixStore:
        """Past timelines. To be used on the engine thread only: see `call`."""
        return self._worker.store

    def close(self) -> None:
        """Cancel everything and wait until the thread has let go of it. Callable twice; not from the engine thread."""
        self._closer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(worker: Worker, run: thread.Run) -> None:
    worker.close()
    run.wait()
