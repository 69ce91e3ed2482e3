"""Requests in the form of OpenAI's Responses API (its text and tool subset), and the conversation they stand for.

Knows field names and how input items become the library's messages; no answers, no HTTP. Nothing is stored, so what
refers to stored things is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .failures import ApiError
from .protocol import MAX_TOOLS, Name, Positive, StreamOptions
from .strict import Open, Strict

JSON = dict[str, Any]


class Content(Open):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Open):
    """An input item. Which fields it needs depends on its type; unknown types are refused with their place."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Content] | None = None
    summary: list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Content] | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: JSON | None = None
    strict: bool | None = None

    def plain(self) -> JSON:
        out: JSON = {"name": self.name}
        if self.description is not None:
            out["description"] = self.description
        return {"type": "function", "function": {**out, "parameters": self.parameters or {"type": "object"}}}


class NamedFunction(Strict):
    type: Literal["function"]
    name: Name


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JSON | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    harmless: ClassVar = {"verbosity": ("medium",)}
    format: TextFormat | None = None


class Reasoning(Strict):
    """`summary` is accepted because thoughts are given in full."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    harmless: ClassVar = {
        "background": (False,), "truncation": ("disabled",), "service_tier": ("auto", "default"), "include": ([],),
        "top_logprobs": (0,), "store": (False,),
    }  # fmt: skip

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    user: str | None = None
    metadata: JSON | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesRequest:
        names = [t.name for t in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("two tools have the same name")
        if isinstance(self.tool_choice, NamedFunction) and self.tool_choice.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.name}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools")
        return self

    @property
    def sampling(self) -> JSON:
        values = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def thinking(self) -> bool | None:
        effort = self.reasoning.effort if self.reasoning else None
        return None if effort is None else effort not in ("none", "minimal")

    @property
    def template_options(self) -> JSON:
        effort = self.reasoning.effort if self.reasoning else None
        return {} if effort in (None, "none") else {"reasoning_effort": effort}

    def conversation(self) -> list[JSON]:
        """The messages in the library's form.

        Raises:
            ApiError: an item cannot be read by this model.
        """
        out: list[JSON] = []
        if self.instructions:
            out.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*out, {"role": "user", "content": self.input}]
        for i, item in enumerate(self.input):
            _add(out, item, f"input[{i}]")
        return out


def _add(out: list[JSON], item: Item, place: str) -> None:
    """Put an item into the conversation. Thoughts, text and calls of one turn are items of their own there."""
    if item.type == "message":
        if item.role is None:
            raise ApiError(400, "A message needs a role.", param=f"{place}.role", code="invalid_message")
        text = _text(item.content, place)
        if item.role == "assistant":
            _turn(out)["content"] += text
        else:
            out.append({"role": item.role, "content": text})
    elif item.type == "reasoning":
        # Items that other servers made may hold encrypted thoughts only; there is nothing to read in those.
        _turn(out)["reasoning_content"] = _text(item.content or item.summary or "", place)
    elif item.type == "function_call":
        if not item.name:
            raise ApiError(400, "A function call needs a name.", param=f"{place}.name", code="invalid_message")
        function = {"name": item.name, "arguments": item.arguments or ""}
        call = {"id": item.call_id or place, "type": "function", "function": function}
        _turn(out).setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        out.append({"role": "tool", "content": _text(item.output, place), "tool_call_id": item.call_id or ""})
    else:
        raise ApiError(
            400, f"An item of type {item.type[:40]!r} cannot be read.", param=f"{place}.type", code="invalid_message"
        )


def _turn(out: list[JSON]) -> JSON:
    """The assistant's turn that is being put together."""
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": ""})
    return out[-1]


def _text(content: str | list[Content] | None, place: str) -> str:
    if content is None:
        raise ApiError(400, "An item has no content.", param=place, code="invalid_message")
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            why = f"A part of type {part.type[:40]!r} cannot be read; this model reads text only."
            raise ApiError(400, why, param=place, code="invalid_message")
        texts.append(text)
    return "".join(texts)
