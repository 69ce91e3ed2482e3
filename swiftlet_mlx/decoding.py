"""One token after another: a pass of the model, the choice of a token, and the wait for it.

Knows the model, a timeline and a sampler; not when to stop. A step is launched and later taken. Where no layer waits
for the host (no streamed experts, or all of them resident), the step after is launched before the token is waited
for, as mlx-lm does: building its graph hides behind the computation of the token. Where layers read the router's
choice back, launching would itself wait for the token and only delay it.

Invariant: the timeline is told of every token that was fed, also of one fed ahead that nobody wants any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from .sampling import Sampler, Sampling, best
from .timeline import Timeline

Processor = Callable[[list[int], mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token."""

    id: int
    logprob: float | None = None
    """Natural logarithm of its probability under the model, if asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (id, log-probability) pairs, best first, if asked for."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Arrays under way: the token and, if asked for, its log-probability, the best ids and theirs."""

    choice: mx.array
    report: tuple[mx.array, mx.array, mx.array] | None


class Decoder:
    """Decodes after a timeline whose last token is still to be fed.

    Args:
        model: called as mlx-lm calls it.
        timeline: what has been fed.
        sampling: how to choose.
        eos_ids: end tokens.
        logprobs: None, or how many alternatives to report.
        processors: f(generated ids, logits [V]) -> logits [V].
    """

    def __init__(
        self,
        model: Any,
        timeline: Timeline,
        sampling: Sampling,
        eos_ids: Iterable[int],
        logprobs: int | None,
        processors: Sequence[Processor],
    ) -> None:
        self._model = model
        self._timeline = timeline
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._logprobs = logprobs
        self._processors = processors
        self._sampler: Sampler | None = None
        self._generated: list[int] = []
        self._under_way: _Step | None = None

    def take(self, last: int, *, more: bool) -> Token:
        """The token after `last`.

        Args:
            last: the token taken before, or the prompt's last.
            more: whether another one may be wanted after it.
        """
        step = self._under_way
        if step is None:
            step = self._launch(mx.array([[last]]))
            self._timeline.fed([last])
        ahead = more and not self._processors and not waits_for_host(self._model)
        self._under_way = self._launch(step.choice.reshape(1, 1)) if ahead else None
        token = _read_back(step)  # the one host synchronisation of a step, outside the model
        if ahead:
            self._timeline.fed([token.id])
        self._generated.append(token.id)
        return token

    def _launch(self, ids: mx.array) -> _Step:
        """Feed ids [1, 1]; nothing is waited for here."""
        logits = self._model(ids, cache=self._timeline.caches)[0, -1]  # [V]
        for process in self._processors:
            logits = process(self._generated, logits)
        if self._sampler is None:
            self._sampler = Sampler(self._sampling, logits.shape[-1], self._eos_ids)
        choice = self._sampler.draw(logits)
        step = _Step(choice, None if self._logprobs is None else _report(logits, choice, self._logprobs))
        mx.async_eval(step.choice, *(step.report or ()))  # type: ignore[no-untyped-call]
        return step


def waits_for_host(model: Any) -> bool:
    """True if a decode step of the model reads the router's choice back somewhere."""
    pools = getattr(model, "pools", None)
    return pools is not None and (
        pools.recorder is not None or not all(pool.complete for pool in pools.layers.values())
    )


def _report(logits: mx.array, choice: mx.array, n_top: int) -> tuple[mx.array, mx.array, mx.array]:
    scores = logits.astype(mx.float32)
    scores = scores - mx.logsumexp(scores)
    top = best(scores, min(n_top, scores.shape[-1])) if n_top else mx.zeros((0,), dtype=mx.uint32)
    return scores[choice], top, scores[top]


def _read_back(step: _Step) -> Token:
    token = cast("int", step.choice.item())
    if step.report is None:
        return Token(token)
    own, ids, others = step.report
    top = zip(cast("list[int]", ids.tolist()), cast("list[float]", others.tolist()), strict=True)
    return Token(token, cast("float", own.item()), tuple(top))
