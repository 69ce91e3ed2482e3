"""POST /v1/responses: OpenAI's Responses, whole and streamed. The text and tool subset; nothing is kept.

Knows the shapes of answers and events; requests are in responses_protocol. Invariant: the last event of a stream
carries the response that the same request would have got whole.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from swiftlet_mlx.events import Event, Finish, Started, Statistics, TextDelta, ThinkingDelta, ToolCall

from .asking import Conversation
from .constrain import constrained, constrained_calls
from .deliver import Answer, Wish
from .desk import Desk
from .failures import ApiError, dumps
from .protocol import JsonSchema, ResponseFormat
from .responses_protocol import NamedFunction, ResponsesRequest, TextFormat

JSON = dict[str, Any]


def responses(desk: Desk, request: ResponsesRequest) -> Wish:
    """What a request asks for.

    Raises:
        ApiError: something in it will not be honoured.
    """
    choice = request.tool_choice
    forced = choice.name if isinstance(choice, NamedFunction) else "" if choice == "required" else None
    tools = [t for t in request.tools or () if choice != "none"]
    plain = tuple(t.plain() for t in tools)
    wanted = _format(request.text.format if request.text else None)
    conversation = Conversation(
        messages=request.conversation(),
        sampling=request.sampling,
        max_tokens=request.max_output_tokens,
        thinking=request.thinking,
        tools=plain,
        forced=forced,
        template_options=request.template_options,
        constraint=constrained(wanted, tools=bool(tools))
        or constrained_calls(plain, [bool(t.strict) for t in tools], forced=forced is not None, field="tools"),
    )
    conversation.check(desk.settings, desk.engine.context_tokens)
    model = desk.settings.model_id
    return Wish(
        characters=conversation.characters,
        starts=[partial(conversation.start, desk.completions, desk.settings)],
        whole=lambda answers: _Response(model, request).whole(answers),
        writer=ResponsesWriter(_Response(model, request)) if request.stream else None,
        one_call=not request.parallel_tool_calls,
    )


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    """The same wish in Chat Completions' words."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat(type="json_object")
    if wanted.schema_ is None:
        raise ApiError(400, "text.format.schema is missing.", param="text.format.schema", code="invalid_value")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=wanted.schema_))


class _Response:
    """One response object in its states."""

    def __init__(self, model: str, request: ResponsesRequest) -> None:
        choice = request.tool_choice
        self._base: JSON = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_output_tokens": request.max_output_tokens,
            "tools": [t.model_dump(exclude_none=True) for t in request.tools or ()],
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": request.text.format.type if request.text and request.text.format else "text"}},
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "truncation": "disabled",
        }

    def state(self, status: str, output: Sequence[JSON] = (), **more: Any) -> JSON:
        rest = {"error": None, "incomplete_details": None, "usage": None, **more}
        return {**self._base, "status": status, "output": list(output), **rest}

    def ended(self, output: Sequence[JSON], finish: Finish | None, statistics: Statistics | None) -> JSON:
        usage = _usage(statistics) if statistics else None
        if finish is not None and finish.reason == "length":
            return self.state("incomplete", output, incomplete_details={"reason": "max_output_tokens"}, usage=usage)
        return self.state("completed", output, usage=usage)

    def whole(self, answers: Sequence[Answer]) -> JSON:
        answer = answers[0]
        status = "incomplete" if answer.finish and answer.finish.reason == "length" else "completed"
        output: list[JSON] = []
        if answer.thinking:
            output.append(_reasoning(_id("rs"), answer.thinking, status if not answer.text else "completed"))
        if answer.text:
            output.append(_message(_id("msg"), answer.text, status))
        output += [_call(_id("fc"), call, call.arguments, "completed") for call in answer.calls]
        return self.ended(output, answer.finish, answer.statistics)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _message(item: str, text: str, status: str) -> JSON:
    return {"id": item, "type": "message", "role": "assistant", "status": status, "content": [_part(text)]}


def _part(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(item: str, text: str, status: str) -> JSON:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": item, "type": "reasoning", "summary": [], "content": content, "status": status}


def _call(item: str, call: ToolCall, arguments: str, status: str) -> JSON:
    out = {"id": item, "type": "function_call", "call_id": call.id, "name": call.name}
    return {**out, "arguments": arguments, "status": status}


def _usage(s: Statistics) -> JSON:
    return {
        "input_tokens": s.prompt_tokens,
        "input_tokens_details": {"cached_tokens": s.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": s.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": s.thinking_tokens},
        "total_tokens": s.prompt_tokens + s.generated_tokens,
    }


class ResponsesWriter:
    """The events of one streamed response: items opened, grown and closed one after another."""

    heartbeat = b": still here\n\n"

    def __init__(self, response: _Response) -> None:
        self._response = response
        self._number = 0
        self._output: list[JSON] = []
        self._kind: str | None = None
        self._item = ""
        self._text = ""
        self._statistics: Statistics | None = None

    def event(self, choice: int, event: Event) -> bytes:
        if isinstance(event, Started):
            state = self._response.state("in_progress")
            return self._frame("response.created", response=state) + self._frame("response.in_progress", response=state)
        if isinstance(event, ThinkingDelta | TextDelta):
            kind = "reasoning_text" if isinstance(event, ThinkingDelta) else "output_text"
            frames = self._enter(kind)
            self._text += event.text
            more: JSON = {} if kind == "reasoning_text" else {"logprobs": []}
            return frames + self._frame(f"response.{kind}.delta", delta=event.text, **self._at(), **more)
        if isinstance(event, ToolCall):
            return self._leave("completed") + self._whole_call(event)
        if isinstance(event, Statistics):
            self._statistics = event
        if isinstance(event, Finish):
            return self._finish(event)
        return b""

    def end(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        what = {"code": error.code or "server_error", "message": error.message}
        return self._frame("response.failed", response=self._response.state("failed", self._output, error=what))

    def _finish(self, finish: Finish) -> bytes:
        status = "incomplete" if finish.reason == "length" else "completed"
        frames = self._leave(status)
        ended = self._response.ended(self._output, finish, self._statistics)
        return frames + self._frame(f"response.{status}", response=ended)

    def _whole_call(self, call: ToolCall) -> bytes:
        item, index = _id("fc"), len(self._output)
        done = _call(item, call, call.arguments, "completed")
        self._output.append(done)
        at = {"item_id": item, "output_index": index}
        return b"".join(
            (
                self._frame(
                    "response.output_item.added", output_index=index, item=_call(item, call, "", "in_progress")
                ),
                self._frame("response.function_call_arguments.delta", delta=call.arguments, **at),
                self._frame("response.function_call_arguments.done", arguments=call.arguments, name=call.name, **at),
                self._frame("response.output_item.done", output_index=index, item=done),
            )
        )

    def _enter(self, kind: str) -> bytes:
        if self._kind == kind:
            return b""
        frames = self._leave("completed")
        self._kind, self._text = kind, ""
        if kind == "output_text":
            self._item = _id("msg")
            begun = {**_message(self._item, "", "in_progress"), "content": []}
            part = _part("")
        else:
            self._item = _id("rs")
            begun, part = _reasoning(self._item, "", "in_progress"), {"type": "reasoning_text", "text": ""}
        frames += self._frame("response.output_item.added", output_index=len(self._output), item=begun)
        return frames + self._frame("response.content_part.added", part=part, **self._at())

    def _leave(self, status: str) -> bytes:
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        at, index = self._at(), len(self._output)
        more: JSON
        if kind == "output_text":
            item, part, more = _message(self._item, self._text, status), _part(self._text), {"logprobs": []}
        else:
            item, part = _reasoning(self._item, self._text, status), {"type": "reasoning_text", "text": self._text}
            more = {}
        self._output.append(item)
        return (
            self._frame(f"response.{kind}.done", text=self._text, **at, **more)
            + self._frame("response.content_part.done", part=part, **at)
            + self._frame("response.output_item.done", output_index=index, item=item)
        )

    def _at(self) -> JSON:
        return {"item_id": self._item, "output_index": len(self._output), "content_index": 0}

    def _frame(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + dumps(body) + b"\n\n"
