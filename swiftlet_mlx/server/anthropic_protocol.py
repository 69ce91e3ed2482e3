"""Requests in Anthropic's Messages form, and the conversation they stand for.

Knows field names and how blocks become the library's messages; no answers, no HTTP. What is not honoured is
refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .failures import ApiError
from .protocol import MAX_TOOLS, JsonSchema, Name, Positive, ResponseFormat
from .strict import Open, Strict

JSON = dict[str, Any]


class Block(Open):
    """A content block. Which fields it needs depends on its type; unknown types are refused with their place."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JSON | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class MessageIn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(Open):
    """A tool of the client's own. Tools that a server would run are refused."""

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: JSON
    strict: bool = False

    def plain(self) -> JSON:
        out: JSON = {"name": self.name}
        if self.description is not None:
            out["description"] = self.description
        return {"type": "function", "function": {**out, "parameters": self.input_schema}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool, and only with it")
        return self


class Thinking(Strict):
    """Whether to think. A budget is taken for the wish to think: how long is the model's choice and max_tokens'."""

    harmless: ClassVar = {"display": ("summarized",)}
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: JSON = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(Strict):
    """POST /v1/messages/count_tokens."""

    harmless: ClassVar = {
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }
    model: str | None = None
    messages: Annotated[list[MessageIn], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: JSON | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CountRequest:
        names = [t.name for t in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("two tools have the same name")
        choice = self.tool_choice
        if choice is not None and choice.type == "any" and not names:
            raise ValueError("tool_choice is any, but there are no tools")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise ValueError(f"tool_choice names {choice.name}, which is not among the tools")
        return self

    @property
    def offered(self) -> tuple[JSON, ...]:
        """The tools to be shown to the model."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return ()
        return tuple(t.plain() for t in self.tools or ())

    @property
    def strict(self) -> list[bool]:
        """Which of the offered tools are strict."""
        return [t.strict for t in self.tools or ()] if self.offered else []

    @property
    def response_format(self) -> ResponseFormat | None:
        """The wished format in Chat Completions' words."""
        wanted = self.output_config.format if self.output_config else None
        if wanted is None:
            return None
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=wanted.schema_))

    @property
    def forced(self) -> str | None:
        """The tool that must be called, "" for any, None for none."""
        if self.tool_choice is None or self.tool_choice.type in ("auto", "none"):
            return None
        return self.tool_choice.name or ""

    @property
    def template_options(self) -> JSON:
        effort = self.output_config.effort if self.output_config else None
        return {} if effort is None else {"reasoning_effort": effort}

    def conversation(self) -> list[JSON]:
        """The messages in the library's form.

        Raises:
            ApiError: a block cannot be read by this model.
        """
        out: list[JSON] = []
        if self.system:
            out.append({"role": "system", "content": _text(self.system, "system")})
        for i, message in enumerate(self.messages):
            out += _messages(message, f"messages[{i}]")
        return out


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: JSON | None = None

    @property
    def sampling(self) -> JSON:
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in values.items() if value is not None}


def _messages(message: MessageIn, place: str) -> list[JSON]:
    """One of theirs may be several of ours: each tool result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, place)]
    out: list[JSON] = []
    for i, block in enumerate(message.content):
        at = f"{place}.content[{i}]"
        if block.type == "tool_result" and message.role == "user":
            text = _text(block.content or "", at)
            out.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id or ""})
        elif out and out[-1]["role"] == message.role:
            out[-1]["content"] += _text([block], at)
        else:
            out.append({"role": message.role, "content": _text([block], at)})
    return out or [{"role": message.role, "content": ""}]


def _assistant(blocks: list[Block], place: str) -> JSON:
    out: JSON = {"role": "assistant", "content": ""}
    calls = []
    for i, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.name:
                raise ApiError(400, "A tool_use block needs a name.", param=f"{place}.content[{i}].name")
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id or f"call_{i}", "type": "function", "function": function})
        elif block.type == "thinking":
            out["reasoning_content"] = out.get("reasoning_content", "") + (block.thinking or "")
        elif block.type != "redacted_thinking":
            out["content"] += _text([block], f"{place}.content[{i}]")
    return {**out, "tool_calls": calls} if calls else out


def _text(content: str | list[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            text = f"A block of type {block.type[:40]!r} cannot be read; this model reads text only."
            raise ApiError(400, text, param=place, code="invalid_message")
    return "".join(block.text or "" for block in content)
