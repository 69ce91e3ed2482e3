"""The one thread that owns MLX: loads the model, runs one request at a time, frees what it made.

Knows threads, queues and life cycles; the work itself is in generation.py. Invariants: nothing of MLX is
touched on any other thread. Requests run in the order they came. An exception ends the request it belongs to
and no other. The thread is joined before the interpreter goes, for MLX aborts the process otherwise.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypeVar

import mlx.core as mx

from . import context, thread
from .channel import Channel
from .errors import (
    ContextFull,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    GenerationFailed,
    OptionError,
    SwiftletError,
)
from .events import Event
from .generation import Generation, Prefill, Request
from .prefill import prefill as read_layer_by_layer
from .timeline import PrefixStore

T = TypeVar("T")
State = Literal["loading", "ready", "busy", "failed", "closed"]


class Stream:
    """The events of one request, to be iterated once, with `for` in any thread or `async for` in any loop.

    Iteration raises what the request failed with. Dropping the last reference cancels.
    """

    def __init__(self, job: _Job) -> None:
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
    ) -> None:
        if prefix_cache_gb is not None and not 0 <= prefix_cache_gb < 1e6:
            raise OptionError(f"prefix_cache_gb is {prefix_cache_gb}; it must be 0 or more.")
        if prefill_step_size < 1:
            raise OptionError(f"prefill_step_size is {prefill_step_size}; it must be 1 or more.")
        self._worker = _Worker(
            load,
            None if prefix_cache_gb is None else int(prefix_cache_gb * 1e9),
            context_tokens,
            prefill_step_size,
            prefill,
            counters,
            max_waiting,
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


def _close(worker: _Worker, run: thread.Run) -> None:
    worker.close()
    run.wait()


class _Job:
    """A request in the queue or at work."""

    def __init__(self, owner: _Worker, request: Request) -> None:
        self.owner = owner
        self.request = request
        self.events: Channel[Event] = Channel()
        self.cancelled = False
        self.submitted = time.perf_counter()


class _Call:
    """A function in the queue."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Future[Any] = Future()


class _Worker:
    """What the engine thread runs. Holds no reference to the Engine, so that a forgotten Engine closes
    itself."""

    def __init__(
        self,
        load: Callable[[], tuple[Any, Any]],
        store_bytes: int | None,
        context_tokens: int | None,
        prefill_step_size: int,
        prefill: Prefill | None,
        counters: Callable[[Any], Mapping[str, int]] | None,
        max_waiting: int | None,
    ) -> None:
        self.model: Any = None
        self.tokenizer: Any = None
        self.loaded: Future[None] = Future()
        self.context_tokens = context_tokens
        self.n_vocab: int | None = None
        self.store = PrefixStore(store_bytes or 0)
        self._asks_for_store = store_bytes is None
        self._limited_by = "option"
        self._load = load
        self._prefill_step_size = prefill_step_size
        self._prefill = prefill
        self._counters = counters
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._queue: deque[_Job | _Call] = deque()
        self._background: deque[_Job] = deque()
        self._running: _Job | _Call | None = None
        self._closing = False
        self._failure: BaseException | None = None

    # ---- called from any thread
    # ------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self._failure is not None:
            return "failed"
        if self._closing:
            return "closed"
        if not self.loaded.done():
            return "loading"
        running = self._running
        busy = isinstance(running, _Job) and not running.request.background
        return "busy" if busy or self._queue else "ready"

    @property
    def waiting(self) -> int:
        return sum(isinstance(job, _Job) for job in list(self._queue))

    def submit(self, request: Request) -> _Job:
        job = _Job(self, request)
        if self.loaded.done():
            self._open()
            job.request = self.checked(request)
        with self._changed:
            self._open()
            if request.background:
                self._background.append(job)
            else:
                waiting = self.waiting
                if self._max_waiting is not None and waiting >= self._max_waiting:
                    raise EngineBusy(
                        f"{waiting} requests are waiting and {self._max_waiting} may. Try again later.",
                        waiting=waiting,
                    )
                self._queue.append(job)
                self._give_way()
            self._changed.notify()
        return job

    def call(self, function: Callable[[], T]) -> Future[T]:
        call = _Call(function)
        with self._changed:
            self._open()
            self._queue.append(call)
            self._give_way()
            self._changed.notify()
        return call.result

    def tidy(self) -> None:
        """End at once what was cancelled while it waited, so that nobody waits for its turn to be told."""
        with self._changed:
            for queue in (self._queue, self._background):
                for job in [j for j in queue if isinstance(j, _Job) and j.cancelled]:
                    queue.remove(job)
                    _end_unstarted(job)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            if isinstance(self._running, _Job):
                self._running.cancelled = True
            self._changed.notify()

    def checked(self, request: Request) -> Request:
        """The request with its budget clamped to the context.

        Raises:
            OptionError, ContextFull: it cannot be served.
        """
        n = len(request.ids)
        if n == 0:
            raise OptionError("The prompt is empty; give at least one token.")
        if request.max_tokens < 0:
            raise OptionError(f"max_tokens is {request.max_tokens}; it must be 0 or more.")
        if self.n_vocab is not None:
            bad = next((i for i in request.ids if not 0 <= i < self.n_vocab), None)
            if bad is not None:
                raise OptionError(f"The prompt has token id {bad}; this model's are 0 to {self.n_vocab - 1}.")
            request.sampling.check_vocabulary(self.n_vocab)
        return replace(request, max_tokens=self.room(n, request.max_tokens))

    def room(self, prompt_tokens: int, max_tokens: int) -> int:
        if self.context_tokens is None:
            return max_tokens
        if prompt_tokens >= self.context_tokens:
            why = ", for more do not fit into memory" if self._limited_by == "memory" else ""
            raise ContextFull(
                f"The prompt has {prompt_tokens} tokens and the context holds {self.context_tokens}, reply "
                f"included{why}. Shorten it or drop old messages.",
                prompt_tokens=prompt_tokens,
                reply_tokens=max_tokens,
                context_tokens=self.context_tokens,
            )
        return min(max_tokens, self.context_tokens - prompt_tokens)

    def _open(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"The model could not be loaded: {self._failure}") from self._failure
        if self._closing:
            raise EngineClosed("The engine is closed.")

    def _give_way(self) -> None:
        running = self._running
        if isinstance(running, _Job) and running.request.background:
            running.cancelled = True

    # ---- on the engine thread
    # --------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            if self._start():
                while (work := self._next()) is not None:
                    self._do(work)
                    self._running = work = None
        finally:
            self._stop()

    def _start(self) -> bool:
        try:
            self.model, self.tokenizer = self._load()
            if getattr(self.model, "pools", None) is not None:
                self.model.pools.alone = True
                self._prefill = self._prefill or read_layer_by_layer
            self.n_vocab = context.stated(self.model, "vocab_size")
            free = context.free_bytes()
            if self.context_tokens is None:
                self.context_tokens, self._limited_by = context.longest(self.model, free)
            if self._asks_for_store:
                self.store.budget_bytes = context.store_bytes(free)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            with self._changed:
                self._failure = error
            failed = EngineFailed(f"The model could not be loaded: {error}")
            failed.__cause__ = error
            self.loaded.set_exception(failed)
            return False
        self.loaded.set_result(None)
        return True

    def _next(self) -> _Job | _Call | None:
        with self._changed:
            while True:
                if self._closing:
                    return None
                if self._queue:
                    self._running = self._queue.popleft()
                    return self._running
                if self._background:
                    self._running = self._background.popleft()
                    return self._running
                self._changed.wait()

    def _do(self, work: _Job | _Call) -> None:
        if isinstance(work, _Call):
            if work.result.set_running_or_notify_cancel():
                try:
                    work.result.set_result(work.function())
                except BaseException as error:
                    _clear(error)
                    work.result.set_exception(error)
            return
        work.events.end(self._generate(work))

    def _generate(self, job: _Job) -> BaseException | None:
        model = self.model
        counters = self._counters
        try:
            request = self.checked(job.request)
            Generation(
                model=model,
                store=self.store,
                request=request,
                emit=job.events.put,
                cancelled=lambda: job.cancelled,
                submitted=job.submitted,
                prefill_step_size=self._prefill_step_size,
                prefill=self._prefill,
                counters=(lambda: counters(model)) if counters else dict,
            ).run()
        except BaseException as error:  # whatever it is, it is this request's, and the thread serves others
            _clear(error)
            mx.clear_cache()
            if isinstance(error, SwiftletError):
                return error
            failed = GenerationFailed(f"Generation failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            return failed
        return None

    def _stop(self) -> None:
        """Refuse what still waits, and free on this thread what was made on it."""
        with self._changed:
            self._closing = True
            left = [*self._queue, *self._background]
            self._queue.clear()
            self._background.clear()
        for work in left:
            if isinstance(work, _Call):
                if work.result.set_running_or_notify_cancel():
                    work.result.set_exception(EngineClosed("The engine is closed."))
            elif self._failure is not None:
                failed = EngineFailed(f"The model could not be loaded: {self._failure}")
                failed.__cause__ = self._failure
                work.events.end(failed)
            else:
                work.events.end(EngineClosed("The engine is closed."))
        self.store.clear()
        self.model = self._prefill = self._counters = None
        self._load = _nothing
        mx.clear_cache()


def _end_unstarted(job: _Job) -> None:
    events, finish = job.request.consumer.finish("cancelled")
    for event in (*events, finish):
        job.events.put(event)
    job.events.end()


def _nothing() -> tuple[Any, Any]:
    return None, None


def _clear(error: BaseException | None) -> None:
    """Let go of the frames' variables: arrays of a broken pass die here, not where the error is read."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
