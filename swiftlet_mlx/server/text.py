"""POST /v1/completions: OpenAI's older Completions, for plain text without a chat template.

Knows the shapes of requests, answers and chunks, and nothing of conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from swiftlet_mlx.completion import Ask, Completions
from swiftlet_mlx.engine import Stream
from swiftlet_mlx.events import Event, Finish, Started, Statistics, TextDelta, TokenLogprob

from .asking import check_length, varied
from .chunks import LEAST_LOGPROB, ChunkWriter, head, usage
from .deliver import Answer, Wish
from .desk import Desk
from .protocol import StreamOptions, TextRequest
from .settings import Settings


def text(desk: Desk, request: TextRequest) -> Wish:
    """What a request asks for."""
    completions, settings = desk.completions, desk.settings
    characters = [len(p) if isinstance(p, str) else 0 for p in request.prompts]
    check_length(max(characters), desk.engine.context_tokens)
    jobs = [(prompt, i) for prompt in request.prompts for i in range(request.n)]
    echoes = [_shown(completions, prompt) if request.echo else "" for prompt, _ in jobs]
    return Wish(
        characters=max(characters),
        starts=[partial(_start, completions, settings, request, prompt, i) for prompt, i in jobs],
        whole=partial(_whole, settings.model_id, echoes, request.n),
        writer=TextWriter(settings.model_id, desk, request.stream_options, echoes, request.n)
        if request.stream
        else None,
    )


def _start(
    completions: Completions, settings: Settings, request: TextRequest, prompt: str | list[int], choice: int
) -> Stream:
    base = completions.defaults(thinking=False).with_values(**settings.sampling)
    ask = Ask(
        sampling=base.with_values(**varied(request.sampling, choice)),
        max_tokens=request.max_tokens or settings.max_tokens,
        stop=request.stops,
        logprobs=request.logprobs,
    )
    return completions.text(prompt, ask)


def _shown(completions: Completions, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return completions.vocabulary.decode([i for i in prompt if 0 <= i < len(completions.tokenizer)])


def _whole(model: str, echoes: Sequence[str], n: int, answers: Sequence[Answer]) -> dict[str, Any]:
    choices = []
    for i, (answer, echo) in enumerate(zip(answers, echoes, strict=True)):
        reason = answer.finish.reason if answer.finish else "length"
        logprobs = _Logprobs().add(answer.logprobs) if answer.logprobs else None
        choices.append({"index": i, "text": echo + answer.text, "logprobs": logprobs, "finish_reason": reason})
    return {
        **_head(model),
        "choices": choices,
        "usage": _usage([a.statistics for a in answers if a.statistics], n),
    }


def _head(model: str) -> dict[str, Any]:
    return head("cmpl", "text_completion", model)


def _usage(all_statistics: Sequence[Statistics], n: int) -> dict[str, Any]:
    """Each prompt counts once, however many choices it has."""
    total = usage(all_statistics)
    firsts = all_statistics[::n]
    prompt = sum(s.prompt_tokens for s in firsts)
    total["prompt_tokens"] = prompt
    total["prompt_tokens_details"]["cached_tokens"] = sum(s.cached_tokens for s in firsts)
    total["total_tokens"] = prompt + total["completion_tokens"]
    return total


class _Logprobs:
    """Log-probabilities in the form of this endpoint: four lists side by side."""

    def __init__(self) -> None:
        self._at = 0

    def add(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(token.text)
        return {
            "tokens": [t.text for t in tokens],
            "token_logprobs": [max(t.logprob, LEAST_LOGPROB) for t in tokens],
            "top_logprobs": [{o.text: max(o.logprob, LEAST_LOGPROB) for o in t.top} for t in tokens],
            "text_offset": offsets,
        }


class TextWriter(ChunkWriter):
    """The chunks of one streamed request."""

    def __init__(self, model: str, desk: Desk, options: StreamOptions | None, echoes: Sequence[str], n: int) -> None:
        super().__init__(_head(model), desk, options, partial(_usage, n=n))
        self._echoes = echoes
        self._logprobs = [_Logprobs() for _ in echoes]

    def said(self, choice: int, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            shown = self._logprobs[choice].add(event.logprobs) if event.logprobs else None
            return self._text(choice, event.text, logprobs=shown)
        if isinstance(event, Started):
            return self._text(choice, self._echoes[choice])  # empty without echo: the first byte, at once
        if isinstance(event, Finish):
            return self._text(choice, "", reason=event.reason)
        return b""

    def _text(self, choice: int, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        return self.chunk(choice, text=text, logprobs=logprobs, finish_reason=reason)
