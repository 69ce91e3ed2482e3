"""One reply from prompt ids to its last token: take up a timeline, read the prompt, decode, put the timeline
back.

Runs on the engine thread. Knows models, caches and samplers; knows no text (a Consumer does) and no queue.
Whatever happens, the timeline is put back only when every layer's cache has seen the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .decoding import Decoder, Processor
from .decoding import Token as Token
from .events import Event, Finish, FinishReason, Progress, Started, Statistics
from .sampling import Sampling
from .timeline import PrefixStore, Timeline

TELL_SECONDS = 0.1  # a prompt that takes less needs no progress
CLEAR_EVERY = 256  # tokens between two returns of freed buffers to the system, as in mlx-lm


class Consumer(Protocol):
    """Turns tokens into events. Called on the engine thread, so it must be quick and touch no MLX."""

    def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
        """Take a token that is not an end token; return what it brings and, to end the reply, a reason."""

    def finish(self, reason: FinishReason) -> tuple[Sequence[Event], Finish]:
        """The reply is over: flush what was held back and say how it ended."""

    @property
    def thinking_tokens(self) -> int:
        """How many of the tokens so far were thoughts."""


class Prefill(Protocol):
    """A way to read many tokens other than chunk by chunk; see `Engine(prefill=...)`."""

    def __call__(self, model: Any, tokens: mx.array, cache: list[Any], *, progress: Callable[[int, int], None]) -> None:
        """Feed tokens [n] to the model, advance every cache by n and evaluate them.

        `progress(done, n)` must be called about once a second or more often. It may raise: let it pass. The
        caches may then be uneven, for the caller puts them back.
        """


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked for.

    Args:
        ids: the whole prompt. What a timeline already holds of it is not read again.
        consumer: turns tokens into events.
        max_tokens: at most this many tokens; 0 only reads the prompt (to have it ready).
        eos_ids: tokens that end the reply and never reach the consumer.
        sampling: how to choose tokens.
        checkpoints: offsets into ids at which a later request is likely to part (end of the system prompt,
            end of the last message). The largest is taken for the start of this turn.
        logprobs: None, or how many alternatives to report with each token (0: the token alone).
        processors: called in order as f(generated ids, logits [V]) -> logits [V] before sampling.
        background: give way: run only while nothing else waits, and stop as soon as something does.
        then: called on the engine thread in idle time after a reply that was not cancelled; the request it makes, if
            any, is run in the background.
    """

    ids: tuple[int, ...]
    consumer: Consumer
    max_tokens: int = 512
    eos_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    checkpoints: tuple[int, ...] = ()
    logprobs: int | None = None
    processors: tuple[Processor, ...] = ()
    background: bool = False
    then: Callable[[], Request | None] | None = None


class BrokenOff(Exception):
    """Raised out of a pass over the prompt because the request was cancelled. Never leaves this module."""


@dataclass(slots=True)
class Generation:
    """The run of one request. Made, run and dropped on the engine thread.

    Args:
        model: called as mlx-lm calls it: model(ids [1, n], cache=caches) -> logits [1, n, V].
        store: where timelines come from and go back to.
        request: what to do, already checked.
        emit: takes each event.
        cancelled: asked at every token and every piece of the prompt.
        submitted: time.perf_counter() when the request was made.
        prefill_step_size: prompt tokens a pass.
        prefill: how to read more than one token, if not in such passes.
        counters: the model's own counters, for Statistics.
    """

    model: Any
    store: PrefixStore
    request: Request
    emit: Callable[[Event], None]
    cancelled: Callable[[], bool]
    submitted: float
    prefill_step_size: int = 2048
    prefill: Prefill | None = None
    counters: Callable[[], Mapping[str, int]] = dict
    generated: list[int] = field(default_factory=list)
    at_first: Mapping[str, int] = field(default_factory=dict)
    kept: bool = False
    """Whether the store has taken what was read."""

    def run(self) -> None:
        """Generate. Any exception leaves the timeline out of the store."""
        started = time.perf_counter()
        ids, before = self.request.ids, dict(self.counters())
        timeline = self.store.take(ids) or Timeline(make_prompt_cache(self.model))
        cached = len(timeline)
        end = len(ids) if self.request.max_tokens == 0 else len(ids) - 1  # one token is left for its logits
        timeline.turn = min(end, max(self.request.checkpoints, default=end))
        self.emit(Started(len(ids), cached, self.request.max_tokens, started - self.submitted))

        reason: FinishReason = "length"
        times: list[float] = []
        if not self._read(timeline, cached, end):
            reason = "cancelled"
        elif self.request.max_tokens > 0:
            reason = self._decode(timeline, times)
        if self.store.budget_bytes > 0:
            timeline.evaluate()
            self.kept = self.store.put(timeline)

        ended = time.perf_counter()
        first, last = (times[0], times[-1]) if times else (ended, ended)
        events, finish = self.request.consumer.finish(reason)
        for event in events:
            self.emit(event)
        after = self.counters()
        self.emit(
            Statistics(
                prompt_tokens=len(ids),
                cached_tokens=cached,
                generated_tokens=len(self.generated),
                thinking_tokens=self.request.consumer.thinking_tokens,
                queue_seconds=started - self.submitted,
                prefill_seconds=first - started,
                ttft_seconds=first - self.submitted,
                decode_seconds=last - first,
                counters={name: value - before.get(name, 0) for name, value in after.items()},
                prefill_counters={name: value - before.get(name, 0) for name, value in self.at_first.items()},
                ids=tuple(self.generated),
            )
        )
        self.emit(finish)

    def _read(self, timeline: Timeline, cached: int, end: int) -> bool:
        """Read the prompt up to `end`, with checkpoints on the way. False if cancelled."""
        marks: set[int] = set()
        if self.store.budget_bytes > 0:
            marks = {m for c in self.request.checkpoints or (end,) if (m := min(c, end)) > cached}
        for stop in sorted(marks | {end}):
            if not self._feed(timeline, stop):
                return False
            if stop in marks:
                timeline.checkpoint()
        return True

    def _feed(self, timeline: Timeline, end: int) -> bool:
        """Feed the prompt's tokens up to `end`. False if cancelled; the timeline is even in either case."""
        start, n = len(timeline), len(self.request.ids)
        if self.prefill is not None and end - start > 1:
            try:
                tokens = mx.array(self.request.ids[start:end])
                self.prefill(self.model, tokens, timeline.caches, progress=self._progress(start))
            except BrokenOff:
                timeline.rewind(start, uneven=True) if start else timeline.restart(make_prompt_cache(self.model))
                return False
            timeline.fed(self.request.ids[start:end])
            return not self.cancelled()
        while len(timeline) < end:
            if self.cancelled():
                return False
            piece = self.request.ids[len(timeline) : min(end, len(timeline) + self.prefill_step_size)]
            self.model(mx.array([piece]), cache=timeline.caches)
            mx.eval([c.state for c in timeline.caches])  # per piece, or the graph grows with the prompt
            timeline.fed(piece)
            mx.clear_cache()
            if n > self.prefill_step_size:
                self.emit(Progress(len(timeline), n))
        return not self.cancelled()

    def _progress(self, start: int) -> Callable[[int, int], None]:
        told = time.perf_counter()

        def progress(done: int, _total: int) -> None:
            nonlocal told
            if self.cancelled():
                raise BrokenOff
            now = time.perf_counter()
            if now - told > TELL_SECONDS:
                told = now
                self.emit(Progress(start + done, len(self.request.ids)))

        return progress

    def _decode(self, timeline: Timeline, times: list[float]) -> FinishReason:
        """Token by token until an end token, the consumer, the budget or the reader ends it."""
        request, last = self.request, self.request.ids[-1]
        decoder = Decoder(self.model, timeline, request.sampling, request.eos_ids, request.logprobs, request.processors)
        while True:
            token = decoder.take(last, more=len(self.generated) + 1 < request.max_tokens)
            if not times:
                self.at_first = dict(self.counters())
            times.append(time.perf_counter())
            if token.id in request.eos_ids:
                return "stop"
            self.generated.append(token.id)
            events, reason = request.consumer.token(token)
            for event in events:
                self.emit(event)
            if reason is not None:
                return reason
            if len(self.generated) >= request.max_tokens:
                return "length"
            if self.cancelled():
                return "cancelled"
            if len(self.generated) % CLEAR_EVERY == 0:
                mx.clear_cache()
            last = token.id
