"""One token, moment by moment: what the engine thread evaluates, what it waits for, and which thread reads meanwhile.

Knows a subject's pools and puts stop-watches around four of their calls for the length of a run. Invariant: the token
that is shown is the typical one of a run, not the nicest; the watches are taken off whatever happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.generation import Request

from .subject import FIRST_TOKENS, Clock, Subject

Kind = Literal["evaluate", "wait", "read"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `start` to `end`, in seconds since the token began. `thread` counts from 0 by kind."""

    kind: Kind
    start: float
    end: float
    thread: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A token: its seconds, its spans, and what they add up to."""

    seconds: float
    spans: tuple[Span, ...]

    def total(self, kind: Kind) -> float:
        """Seconds of all spans of a kind; reads of several threads at once count each."""
        return sum(span.end - span.start for span in self.spans if span.kind == kind)

    @property
    def host_seconds(self) -> float:
        """Building graphs, look-ups, sampling and the last evaluation: all that is neither evaluated for a router's
        choice nor waited for."""
        return max(0.0, self.seconds - self.total("evaluate") - self.total("wait"))


def measure(subject: Subject, prompt_tokens: int = 32, n_tokens: int = 32) -> Timeline:
    """Decode, and keep the token of median length among those after the first ones.

    Raises:
        OptionError: nothing is streamed, or the run has no token after the first ones.
    """
    if subject.pools is None or n_tokens < FIRST_TOKENS + 3:
        raise OptionError(f"a timeline needs a streamed model and at least {FIRST_TOKENS + 3} tokens")
    clock = Clock(subject.pools.stats.copy)
    with _watched(subject.pools) as seen:
        request = Request(ids=tuple(subject.prompt(prompt_tokens)), consumer=clock, max_tokens=n_tokens)
        for _ in subject.engine.submit(request):
            pass
    steps = list(zip(clock.times[FIRST_TOKENS:], clock.times[FIRST_TOKENS + 1 :], strict=False))
    start, end = sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]
    return _cut(seen, start, end)


def _cut(seen: list[tuple[Kind, float, float, int]], start: float, end: float) -> Timeline:
    """What lies between two moments, with waiting taken out of the evaluations that contain it."""
    threads: dict[int, int] = {}
    spans = []
    waits = sorted((a, b) for kind, a, b, _ in seen if kind == "wait")
    for kind, a, b, thread in sorted(seen, key=lambda span: span[1]):
        if a < start or b > end:
            continue
        n = threads.setdefault(thread, len(threads)) if kind == "read" else 0
        pieces = [(a, b)] if kind != "evaluate" else _without(a, b, waits)
        spans += [Span(kind, x - start, y - start, n) for x, y in pieces]
    return Timeline(end - start, tuple(spans))


def _without(start: float, end: float, waits: list[tuple[float, float]]) -> list[tuple[float, float]]:
    pieces = []
    for a, b in waits:
        if start <= a and b <= end:
            pieces.append((start, a))
            start = b
    return [*pieces, (start, end)]


@contextmanager
def _watched(pools: Any) -> Iterator[list[tuple[Kind, float, float, int]]]:
    """Note when a router's choice is waited for, when reads are, and when a thread reads."""
    seen: list[tuple[Kind, float, float, int]] = []
    inside: set[tuple[Kind, int]] = set()

    def watch(kind: Kind, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            here = kind, threading.get_ident()
            if here in inside:
                return call(*args)
            inside.add(here)
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                inside.discard(here)
                seen.append((kind, start, time.perf_counter(), here[1]))

        return timed

    watched: list[tuple[Any, str, Kind]] = [
        (pools, "choice", "evaluate"), (pools, "resolve", "evaluate"), (pools, "wait", "wait"),
        (pools.source, "read", "read"),
    ]  # fmt: skip
    for owner, name, kind in watched:
        setattr(owner, name, watch(kind, getattr(owner, name)))
    try:
        yield seen
    finally:
        for owner, name, _ in watched:
            delattr(owner, name)
