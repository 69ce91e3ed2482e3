"""POST /v1/messages: Anthropic's Messages, whole and streamed, so that agents made for it can use a local model.

Knows the shapes of answers and events; requests are in anthropic_protocol. Invariant: an answer and its stream have
the same blocks in the same order: thinking, text, tool use.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from swiftlet_mlx.events import Event, Finish, Started, Statistics, TextDelta, ThinkingDelta, ToolCall

from .anthropic_protocol import CountRequest, MessagesRequest
from .asking import Conversation
from .constrain import constrained, constrained_calls
from .deliver import Answer, Wish
from .desk import Desk
from .failures import ApiError, dumps


def messages(desk: Desk, request: MessagesRequest) -> Wish:
    """What a request asks for.

    Raises:
        ApiError: something in it will not be honoured.
    """
    conversation = Conversation(
        messages=request.conversation(),
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
        thinking=_thinking(desk, request),
        tools=request.offered,
        forced=request.forced,
        template_options=request.template_options,
        constraint=constrained(request.response_format, tools=bool(request.offered))
        or constrained_calls(request.offered, request.strict, forced=request.forced is not None, field="tools"),
    )
    conversation.check(desk.settings, desk.engine.context_tokens)
    choice = request.tool_choice
    return Wish(
        characters=conversation.characters,
        starts=[partial(conversation.start, desk.completions, desk.settings)],
        whole=partial(_whole, desk.settings.model_id),
        writer=MessagesWriter(desk.settings.model_id) if request.stream else None,
        one_call=choice is not None and choice.disable_parallel_tool_use,
    )


async def count(desk: Desk, request: CountRequest) -> dict[str, Any]:
    """POST /v1/messages/count_tokens."""
    conversation = Conversation(
        messages=request.conversation(),
        thinking=_thinking(desk, request),
        tools=request.offered,
        template_options=request.template_options,
    )
    conversation.check(desk.settings, desk.engine.context_tokens)
    return {"input_tokens": len(await desk.prompt_ids(conversation))}


def _thinking(desk: Desk, request: CountRequest) -> bool | None:
    """Without the field there are no thoughts, for such clients take the first block for the answer."""
    if request.thinking is None:
        return desk.settings.thinking or False
    return request.thinking.type != "disabled"


# ---- whole answers -----------------------------------------------------------------------------------------------


def _whole(model: str, answers: Sequence[Answer]) -> dict[str, Any]:
    answer = answers[0]
    content: list[dict[str, Any]] = []
    if answer.thinking:
        content.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
    if answer.text or not answer.calls:
        content.append({"type": "text", "text": answer.text})
    content += [{**_begun(c), "input": json.loads(c.arguments)} for c in answer.calls]
    assert answer.finish is not None
    assert answer.statistics is not None
    return {**_head(model), "content": content, **_ending(answer.finish), "usage": _usage(answer.statistics)}


def _head(model: str) -> dict[str, Any]:
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}


def _begun(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name, "input": {}}


def _ending(finish: Finish) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    reason = "stop_sequence" if finish.stop is not None else reasons.get(finish.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": finish.stop}


def _usage(s: Statistics | Started) -> dict[str, int]:
    return {
        "input_tokens": s.prompt_tokens - s.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": s.cached_tokens,
        "output_tokens": s.generated_tokens if isinstance(s, Statistics) else 0,
    }


# ---- streams -----------------------------------------------------------------------------------------------------


class MessagesWriter:
    """The events of one streamed answer: blocks opened, grown and closed one after another."""

    heartbeat = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str) -> None:
        self._head = _head(model)
        self._index = -1
        self._open: str | None = None
        self._statistics: Statistics | None = None

    def event(self, choice: int, event: Event) -> bytes:
        if isinstance(event, Started):
            nothing: dict[str, Any] = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(event),
            }
            return _frame({"type": "message_start", "message": {**self._head, **nothing}})
        if isinstance(event, ThinkingDelta):
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            return self._enter(empty) + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, TextDelta):
            return self._enter({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, ToolCall):
            begun = self._leave() + self._enter(_begun(event))
            return begun + self._delta({"type": "input_json_delta", "partial_json": event.arguments}) + self._leave()
        if isinstance(event, Statistics):
            self._statistics = event
        if isinstance(event, Finish):
            return self._finish(event)
        return b""

    def end(self) -> bytes:
        return _frame({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return _frame(error.body)

    def _finish(self, finish: Finish) -> bytes:
        frames = self._leave()
        if self._index < 0:  # an empty answer still has its block
            frames = self._enter({"type": "text", "text": ""}) + self._leave()
        usage = _usage(self._statistics) if self._statistics else {"output_tokens": 0}
        return frames + _frame({"type": "message_delta", "delta": _ending(finish), "usage": usage})

    def _enter(self, block: dict[str, Any]) -> bytes:
        if self._open == block["type"]:
            return b""
        frames = self._leave()
        self._open = block["type"]
        self._index += 1
        return frames + _frame({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _frame({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _leave(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _frame({"type": "content_block_stop", "index": self._index})


def _frame(body: dict[str, Any]) -> bytes:
    return b"event: " + str(body["type"]).encode() + b"\ndata: " + dumps(body) + b"\n\n"
