"""POST /v1/chat/completions: OpenAI's Chat Completions, whole and streamed.

Knows the shapes of requests, answers and chunks; generation is asked for through `Wish`. Invariant: an answer
and the chunks of a stream carry the same text, thoughts, calls, reason and usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from swiftlet_mlx.events import (
    Event,
    Finish,
    Started,
    TextDelta,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
)

from .asking import Conversation
from .chunks import LEAST_LOGPROB, ChunkWriter, head, usage
from .constrain import constrained, constrained_calls
from .deliver import Answer, Wish
from .desk import Desk
from .protocol import ChatRequest, NamedTool


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
        writer=ChatWriter(_head("chat.completion.chunk", settings.model_id), desk, request.stream_options)
        if request.stream
        else None,
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
        **_head("chat.completion", model),
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
    reason = answer.finish.reason if answer.finish else "length"
    return {"index": index, "message": message, "logprobs": _logprobs(answer.logprobs), "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def thoughts(text: str) -> dict[str, str]:
    """Thoughts under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _head(kind: str, model: str) -> dict[str, Any]:
    return head("chatcmpl", kind, model)


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """Log-probabilities of tokens in OpenAI's form; None if none were asked for."""
    shown = [{**_logprob(p), "top_logprobs": [_logprob(t) for t in p.top]} for p in tokens]
    return {"content": shown, "refusal": None} if shown else None


def _logprob(p: TokenLogprob) -> dict[str, Any]:
    return {"token": p.text, "bytes": list(p.bytes), "logprob": max(p.logprob, LEAST_LOGPROB)}


# ---- streams -----------------------------------------------------------------------------------------------------


class ChatWriter(ChunkWriter):
    """The chunks of one streamed request."""

    def said(self, choice: int, event: Event) -> bytes:
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
        assert isinstance(event, Finish)
        return self._delta(choice, {}, reason=event.reason)

    def _delta(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] = (),
        reason: str | None = None,
    ) -> bytes:
        return self.chunk(choice, delta=delta, logprobs=_logprobs(logprobs), finish_reason=reason)
