"""From a conversation and its options to a reply under way: the part that every chat dialect shares.

Knows completions, tools and templates; no field names of any API. What takes long runs in the functions it
returns, which are called on worker threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swiftlet_mlx.completion import Ask, Completions, Processor
from swiftlet_mlx.engine import Stream
from swiftlet_mlx.errors import MessageError
from swiftlet_mlx.sampling import MAX_SEED
from swiftlet_mlx.template import Prompt

from .constrain import Constraint
from .failures import ApiError, unsupported
from .settings import Settings

# Text has 1 to 6 characters a token. Even a page of blanks has no more than this.
MAX_CHARACTERS_PER_TOKEN = 64
MARK = "zqxname"  # a function's name that appears in no template


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to be answered.

    Args:
        messages: in the library's form.
        sampling: values that were given; the rest are the server's and the model's defaults.
        tools: to be offered.
        forced: None; or the tool that must be called, "" for any.
        constraint: what the reply is held to.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    forced: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    constraint: Constraint | None = None

    def start(self, completions: Completions, settings: Settings, choice: int = 0) -> Stream:
        """Begin the reply. Raises what `Completions.chat` raises."""
        ask = self._ask(completions, settings)
        prompt = completions.render(self.messages, ask)
        base = completions.defaults(thinking=prompt.opens_thinking).with_values(**settings.sampling)
        sampling = base.with_values(**varied(self.sampling, choice))
        ask = replace(ask, sampling=sampling, processors=self._processors(completions, prompt, ask.reply_start))
        return completions.answer(prompt, ask)

    def _processors(self, completions: Completions, prompt: Prompt, begun: str) -> tuple[Processor, ...]:
        if self.constraint is None:
            return ()
        given = begun.removeprefix(completions.markup.tool_start)
        return (self.constraint.processor(completions, thinking=prompt.opens_thinking, given=given),)

    def ids(self, completions: Completions, settings: Settings) -> list[int]:
        """The prompt that `start` would have read. Raises what `Completions.render` raises."""
        return list(completions.render(self.messages, self._ask(completions, settings)).ids)

    def _ask(self, completions: Completions, settings: Settings) -> Ask:
        ask = Ask(
            max_tokens=self.max_tokens or settings.max_tokens,
            stop=self.stop,
            thinking=settings.thinking if self.thinking is None else self.thinking,
            tools=self.tools,
            template_options=self.template_options,
            logprobs=self.logprobs,
        )
        if self.forced is None:
            return ask
        # A forced call begins the reply, so there is no room for a thought before it.
        return replace(ask, thinking=False, reply_start=call_opening(completions, self.forced))

    @property
    def characters(self) -> int:
        """How much text there is, about."""
        contents = [m.get("content") or "" for m in self.messages]
        said = sum(len(c) if isinstance(c, str) else sum(len(p.get("text") or "") for p in c) for c in contents)
        return said + (len(json.dumps(self.tools)) if self.tools else 0)

    def check(self, settings: Settings, context_tokens: int | None) -> None:
        """Refuse what can be refused without templates and tokenizers.

        Raises:
            ApiError: too many messages, or far too much text.
        """
        check_length(self.characters, context_tokens)
        if len(self.messages) > settings.max_messages:
            raise ApiError(
                400,
                f"There are {len(self.messages)} messages; there may be {settings.max_messages}.",
                param="messages",
                code="too_many_messages",
            )


def check_length(characters: int, context_tokens: int | None) -> None:
    """Refuse a text that cannot fit the context, without the seconds that it takes to count its tokens.

    Raises:
        ApiError: it is too long.
    """
    if context_tokens is not None and characters > context_tokens * MAX_CHARACTERS_PER_TOKEN:
        raise ApiError(
            400,
            f"The prompt has {characters} characters, and the context holds {context_tokens} tokens, reply included.",
            param="messages",
            code="context_length_exceeded",
        )


def varied(sampling: Mapping[str, Any], choice: int) -> dict[str, Any]:
    """The values for the n-th choice: with one seed for all, all would be the same."""
    values = dict(sampling)
    if choice and isinstance(values.get("seed"), int) and values["seed"] >= 0:
        values["seed"] = (values["seed"] + choice) & MAX_SEED
    return values


def call_opening(completions: Completions, name: str) -> str:
    """How this model's call of a function begins: found by rendering one, not by knowing formats.

    Args:
        name: of the function; "" leaves it to the model.

    Raises:
        ApiError: the model's template has no calls.
    """
    tag = completions.markup.tool_start
    texts = []
    for arguments in ({}, {MARK: 1}):
        call = {"id": "c", "type": "function", "function": {"name": MARK, "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "t", "tool_call_id": "c"},
            {"role": "user", "content": "u"},
        ]
        try:
            text = completions.template.render(messages).text
        except MessageError:
            raise _no_calls() from None
        at = text.rfind(tag, 0, text.find(MARK)) if tag else -1
        if at < 0:
            raise _no_calls()
        texts.append(text[at:])
    before, after = texts[0].split(MARK, 1)
    if not name:
        return before
    other = texts[1].split(MARK, 1)[1]
    same = next((i for i, (a, b) in enumerate(zip(after, other, strict=False)) if a != b), len(after))
    return before + name + after[:same].rstrip("{<")  # brackets join what follows into one token


def _no_calls() -> ApiError:
    return unsupported("tool_choice", ": this model's template has no tool calls that could be forced")
