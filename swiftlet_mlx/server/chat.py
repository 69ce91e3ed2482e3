"""POST /v1/chat/completions: OpenAI's Chat Completions, whole and streamed.

Knows the shapes of requests, answers and chunks; generation is asked for through `Wish`. Invariant: an answer
and the chunks of a stream carry the same text, thoughts, calls, reason and usage.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from swiftlet_mlx import __version__
from swiftlet_mlx.events import (
    Event,
    Finish,
    Progress,
    Started,
    Statistics,
    TextDelta,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
)

from .asking import Conversation
from .constrain import constrained, constrained_calls
from .deliver import Answer, Wish
from .desk import Desk
from .failures import ApiError, dumps
from .protocol import ChatRequest, NamedTool, StreamOptions

FINGERPRINT = f"swiftlet-mlx-{__version__}"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API says this for "as good as impossible"
DONE = b"data: [DONE]\n\n"


def chat(desk: Desk, request: ChatRequest) -> Wish:
    """What a request asks for.

    Raises:
        ApiError: something in it will not be honoured.
    """
    conversation = _conversation(request)
    conversation.check(desk.settings, desk.engine.context_tokens)
    settings, completions = desk.settings, desk.completions
    return Wish(
        characters=conversation.characters,
        starts=[partial(conversation.start, completions, settings, i) for i in range(request.n)],
        whole=partial(_whole, settings.model_id),
        writer=ChatWriter(settings.model_id, desk, request.stream_options) if request.stream else None,
        one_call=not request.parallel_tool_calls,
    )


def _conversation(request: ChatRequest) -> Conversation:
    choice = request.tool_choice
    forced = choice.function.name if isinstance(choice, NamedTool) else "" if choice == "required" else None
    tools = [t for t in request.tools or () if choice != "none"]
    plain = tuple(t.plain() for t in tools)
    return Conversation(
        messages=[m.plain() for m in request.messages],
        sampling=request.sampling,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=request.stops,
        thinking=request.thinking,
        tools=plain,
        forced=forced,
        template_options=request.template_options,
        logprobs=request.n_logprobs,
        constraint=constrained(request.response_format, tools=bool(tools))
        or constrained_calls(plain, [bool(t.function.strict) for t in tools], forced=forced is not None, field="tools"),
    )


# ---- whole answers -----------------------------------------------------------------------------------------------


def _whole(model: str, answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
        "choices": [_choice(i, answer) for i, answer in enumerate(answers)],
        "usage": usage([a.statistics for a in answers if a.statistics]),
    }


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.thinking:
        message |= thoughts(answer.thinking)
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [_call(c) for c in answer.calls]
    logprobs = {"content": [logprob(p) for p in answer.logprobs], "refusal": None} if answer.logprobs else None
    reason = answer.finish.reason if answer.finish else "length"
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def thoughts(text: str) -> dict[str, str]:
    """Thoughts under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def logprob(p: TokenLogprob) -> dict[str, Any]:
    """A token's log-probability in OpenAI's form."""
    return {**_logprob(p), "top_logprobs": [_logprob(t) for t in p.top]}


def _logprob(p: TokenLogprob) -> dict[str, Any]:
    return {"token": p.text, "bytes": list(p.bytes), "logprob": max(p.logprob, LEAST_LOGPROB)}


def usage(all_statistics: Sequence[Statistics]) -> dict[str, Any]:
    """Token counts of a request's choices together. A prompt counts once, as does what was cached of it."""
    first = all_statistics[0] if all_statistics else None
    prompt = first.prompt_tokens if first else 0
    generated = sum(s.generated_tokens for s in all_statistics)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens if first else 0},
        "completion_tokens_details": {"reasoning_tokens": sum(s.thinking_tokens for s in all_statistics)},
    }


# ---- streams -----------------------------------------------------------------------------------------------------


class ChatWriter:
    """The chunks of one streamed request."""

    heartbeat = b": still here\n\n"

    def __init__(self, model: str, desk: Desk, options: StreamOptions | None) -> None:
        self._options = options or StreamOptions()
        self._desk = desk
        self._all: list[Statistics] = []
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._tail = {"usage": None} if self._options.include_usage else {}

    def event(self, choice: int, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._delta(choice, {"content": event.text}, event.logprobs)
        if isinstance(event, ThinkingDelta):
            return self._delta(choice, thoughts(event.text))
        if isinstance(event, ToolCall):
            call = _call(event)
            begun = {**call, "index": event.index, "function": {**call["function"], "arguments": ""}}
            rest = {"index": event.index, "function": {"arguments": event.arguments}}
            return self._delta(choice, {"tool_calls": [begun]}) + self._delta(choice, {"tool_calls": [rest]})
        if isinstance(event, Started):
            return self._delta(choice, {"role": "assistant", "content": ""})
        if isinstance(event, Progress):
            return self._progress(event)
        if isinstance(event, Statistics):
            self._all.append(event)
            return b""
        assert isinstance(event, Finish)
        return self._delta(choice, {}, reason=event.reason)

    def end(self) -> bytes:
        options, frames = self._options, b""
        if options.include_usage or options.include_statistics:
            body = {**self._head, "choices": [], "usage": usage(self._all)}
            if options.include_statistics and self._all:
                body["statistics"] = figures(self._desk, self._all[-1])
            frames = frame(body)
        return frames + DONE

    def failed(self, error: ApiError) -> bytes:
        return frame({"error": error.error}) + DONE

    def _delta(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        reason: str | None = None,
    ) -> bytes:
        shown = {"content": [logprob(p) for p in logprobs], "refusal": None} if logprobs else None
        one = {"index": choice, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return frame({**self._head, "choices": [one], **self._tail})

    def _progress(self, event: Progress) -> bytes:
        if not self._options.include_progress:
            return b""
        return frame({**self._head, "choices": [], "progress": {"done": event.done, "total": event.total}})


def frame(body: dict[str, Any]) -> bytes:
    """A server-sent event with a JSON object."""
    return b"data: " + dumps(body) + b"\n\n"


def figures(desk: Desk, s: Statistics) -> dict[str, Any]:
    """A reply's figures, for clients that ask for them."""
    return {
        "queue_seconds": s.queue_seconds,
        "prefill_seconds": s.prefill_seconds,
        "ttft_seconds": s.ttft_seconds,
        "decode_seconds": s.decode_seconds,
        "prefill_tokens_per_second": s.prefill_tokens_per_second,
        "decode_tokens_per_second": s.decode_tokens_per_second,
        **{name: s.counters[name] for name in ("hits", "misses", "read_bytes") if name in s.counters},
        **desk.memory(),
    }
