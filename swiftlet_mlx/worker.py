"""What the engine thread does: loads the model, runs one request at a time, reads ahead when nothing else is to do.

Knows queues and life cycles; the work itself is in generation.py. Invariants: nothing of MLX is touched on any other
thread. Requests run in the order they came. An exception ends the request it belongs to and no other.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypeVar

import mlx.core as mx

from . import context
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

IDLE_SECONDS = 0.5  # a program that asks its next question at once should not have to interrupt anything
FEW_TOKENS = 8  # not worth a pass of their own: the next turn reads them with its words
MAX_AHEAD = 4  # replies that may wait to be read as history: as many conversations at a time


class Job:
    """A request in the queue or at work."""

    def __init__(self, owner: Worker, request: Request) -> None:
        self.owner = owner
        self.request = request
        self.events: Channel[Event] = Channel()
        self.cancelled = False
        self.submitted = time.perf_counter()


class Later:
    """What may be asked for in idle time: made then, for it costs something too."""

    def __init__(self, make: Callable[[], Request | None]) -> None:
        self.make = make


class Call:
    """A function in the queue."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Future[Any] = Future()


class Worker:
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
        idle_seconds: float | None,
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
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._queue: deque[Job | Call] = deque()
        self._background: deque[Job] = deque()
        self._ahead: deque[Later] = deque(maxlen=MAX_AHEAD)
        self._running: Job | Call | Later | None = None
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
        busy = isinstance(running, Job) and not running.request.background
        return "busy" if busy or self._queue else "ready"

    @property
    def waiting(self) -> int:
        return sum(isinstance(job, Job) for job in list(self._queue))

    def submit(self, request: Request) -> Job:
        job = Job(self, request)
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
        call = Call(function)
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
                for job in [j for j in queue if isinstance(j, Job) and j.cancelled]:
                    queue.remove(job)
                    _end_unstarted(job)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            if isinstance(self._running, Job):
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
        if isinstance(running, Job) and running.request.background:
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

    def _next(self) -> Job | Call | Later | None:
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
                # False: nobody has come for so long
                if not self._changed.wait(self._idle_seconds if self._ahead else None):
                    self._running = self._ahead.pop()
                    return self._running

    def _do(self, work: Job | Call | Later) -> None:
        if isinstance(work, Call):
            if work.result.set_running_or_notify_cancel():
                try:
                    work.result.set_result(work.function())
                except BaseException as error:
                    _clear(error)
                    work.result.set_exception(error)
            return
        if isinstance(work, Later):
            self._read_ahead(work)
            return
        work.events.end(self._generate(work))

    def _read_ahead(self, later: Later) -> None:
        """Read what is left of a conversation, unless somebody has come or it has been read since."""
        try:
            request = later.make()
        except Exception as error:  # nobody has asked for this, and nobody is to suffer for it
            _clear(error)
            return
        if request is None or self.store.unread(request.ids) <= FEW_TOKENS:
            return
        job = Job(self, replace(request, background=True))
        with self._changed:
            if self._queue or self._closing:
                return
            self._running = job
        job.events.end(self._generate(job))

    def _generate(self, job: Job) -> BaseException | None:
        model = self.model
        counters = self._counters
        try:
            request = self.checked(job.request)
            generation = Generation(
                model=model,
                store=self.store,
                request=request,
                emit=job.events.put,
                cancelled=lambda: job.cancelled,
                submitted=job.submitted,
                prefill_step_size=self._prefill_step_size,
                prefill=self._prefill,
                counters=(lambda: counters(model)) if counters else dict,
            )
            generation.run()
            if request.then is not None and generation.kept and not job.cancelled and self._idle_seconds is not None:
                self._ahead.append(Later(request.then))
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
            self._ahead.clear()
        for work in left:
            if isinstance(work, Call):
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


def _end_unstarted(job: Job) -> None:
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
