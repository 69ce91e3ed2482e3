"""Requests in OpenAI's form: Chat Completions and Completions, and what they ask of the library.

Knows field names, their ranges and meaning; no tokens, no HTTP. What is not honoured is refused by name. Ranges of
sampling values are checked by `Sampling`, places of messages by `checked_messages`, so that every endpoint and
the library say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from .failures import unsupported
from .strict import Open, Strict

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_TOOLS = 512
# Arguments of apply_chat_template and variables it sets itself: a request may not replace the template or its input.
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "messages", "padding", "raise_exception", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Positive = Annotated[int, Field(ge=1)]


# ---- parts -------------------------------------------------------------------------------------------------------


class Part(Open):
    """A part of a message's content. Only text is read; others are refused with the message's place."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Open):
    name: str
    arguments: str | dict[str, Any] | list[Any] | int | float | bool | None = None


class Call(Open):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Open):
    """A message of the conversation. Fields without effect on the prompt (`refusal`, `annotations` ...) are let by."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message as the library takes it."""
        out = self.model_dump(exclude_none=True, exclude={"reasoning"})
        if self.reasoning and not self.reasoning_content:
            out["reasoning_content"] = self.reasoning
        if isinstance(self.content, list):
            out["content"] = [
                {"type": "text", "text": p.refusal} if p.type == "refusal" else p.model_dump() for p in self.content
            ]
        return out


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            out["description"] = self.function.description
        out["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": out}


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and only with it")
        return self


class StreamOptions(Strict):
    """`include_progress` and `include_statistics` are this server's own."""

    harmless: ClassVar = {"include_obfuscation": (False,)}
    include_usage: bool = False
    include_progress: bool = False
    include_statistics: bool = False


# ---- what both endpoints have ------------------------------------------------------------------------------------


class Generating(Strict):
    """Fields of every OpenAI request for text."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling values that were given."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "min_tokens",
        )  # fmt: skip
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            values["logit_bias"] = _biases(self.logit_bias)
        return values

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise unsupported("logit_bias", f": {token[:40]!r} is not a token id")
        biases[int(token)] = bias
    return biases


# ---- chat --------------------------------------------------------------------------------------------------------


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    harmless: ClassVar = {
        "store": (False,), "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"),
        "service_tier": ("auto", "default"), "verbosity": ("medium",), "best_of": (1,), "xtc_probability": (0,),
        "typical_p": (1,), "mirostat": (0,), "ignore_eos": (False,), "use_beam_search": (False,), "echo": (False,),
    }  # fmt: skip

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [t.function.name for t in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools")
        for name in self.chat_template_kwargs or ():
            if name in RESERVED_TEMPLATE_NAMES or not name.isidentifier():
                raise ValueError(f"chat_template_kwargs may not set {name[:40]!r}")
        return self

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinking(self) -> bool | None:
        """What the request says about thoughts; None if it says nothing."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        switch = (self.chat_template_kwargs or {}).get("enable_thinking")
        if isinstance(switch, bool):
            return switch
        return None if self.reasoning_effort is None else self.reasoning_effort not in ("none", "minimal")

    @property
    def template_options(self) -> dict[str, Any]:
        options = {k: v for k, v in (self.chat_template_kwargs or {}).items() if k != "enable_thinking"}
        if self.reasoning_effort not in (None, "none"):
            options.setdefault("reasoning_effort", self.reasoning_effort)
        return options


class TextRequest(Generating):
    """POST /v1/completions."""

    harmless: ClassVar = {
        "best_of": (1,), "suffix": ("",), "xtc_probability": (0,), "typical_p": (1,), "ignore_eos": (False,),
    }  # fmt: skip

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TextRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported")
        if not self.prompts:
            raise ValueError("prompt is empty")
        if len(self.prompts) > MAX_PROMPTS:
            raise ValueError(f"there are {len(self.prompts)} prompts; there may be {MAX_PROMPTS}")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[i for i in self.prompt if isinstance(i, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]


class TokenizeRequest(Strict):
    """POST /tokenize: the ids of a text, or of a conversation as the model would read it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = True
    enable_thinking: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
