"""Asking a model on an engine: messages or text in, a stream of events out. Holds no conversation.

What sessions and servers both stand on. Knows the engine, templates, texts and defaults; no HTTP, no history.
Usable from several threads at once. Invariant: everything that can be refused is refused before the engine
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from .defaults import read_json, sampling_defaults, stated_ends
from .detokenizer import Vocabulary, end_ids
from .engine import Engine, Stream
from .errors import MessageError, OptionError
from .events import Event, Finish, FinishReason
from .generation import Request, Token
from .messages import Message, encodable
from .reply import Reading, Reply
from .sampling import Sampling
from .sessionfile import fingerprint
from .template import ChatTemplate, Prompt
from .text import Markup

MAX_STOPS = 16
DEFAULT_MAX_TOKENS = 4096

Processor = Callable[[list[int], mx.array], mx.array]
"""f(ids generated so far, logits [V]) -> logits [V], on the engine thread, before penalties and sampling."""


@dataclass(frozen=True, slots=True)
class Ask:
    """How a reply is wanted.

    Args:
        sampling: None takes the model's own defaults (see `Completions.defaults`).
        max_tokens: None takes 4096, or what the context still holds if that is less. A number is clamped too.
        stop: up to 16 strings that end the reply; the text before the first one is the reply.
        thinking: False for no thoughts, True for thoughts where the template knows the switch, None for its
            default.
        tools: tools the model may call, in OpenAI's form.
        template_options: more variables for the chat template.
        reply_start: text the reply is made to begin with. It comes out as part of the reply.
        logprobs: None, or how many alternatives to report with each token, 0 to 20.
        sentence_end: end after a whole sentence when the budget is nearly used up.
        processors: functions that change the logits, to constrain what may be said.
    """

    sampling: Sampling | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    reply_start: str = ""
    logprobs: int | None = None
    sentence_end: bool = False
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise OptionError(f"max_tokens is {self.max_tokens!r}; it must be a whole number, 1 or more.")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise OptionError("stop must be a list of strings, none of them empty.")
        if len(self.stop) > MAX_STOPS:
            raise OptionError(f"stop has {len(self.stop)} strings; there may be {MAX_STOPS}.")
        if self.logprobs is not None and (type(self.logprobs) is not int or not 0 <= self.logprobs <= 20):
            raise OptionError(f"logprobs is {self.logprobs!r}; it must be a whole number from 0 to 20.")


class Completions:
    """A model that answers.

    Args:
        engine: with its model loaded; the constructor waits for it.
        folder: the model's folder, for config.json and generation_config.json; None takes the tokenizer's.

    Raises:
        EngineFailed: the model could not be loaded.
        ConfigError: one of the two files is there but broken.
    """

    def __init__(self, engine: Engine, folder: Path | str | None = None) -> None:
        engine.wait()
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.folder = Path(folder or getattr(self.tokenizer, "name_or_path", "") or ".")
        known = folder is not None or self.folder.is_absolute()
        config = read_json(self.folder / "config.json") if known else {}
        self.quantization = config.get("quantization")
        self._fingerprint: str | None = None
        self.generation_config = read_json(self.folder / "generation_config.json") if known else {}
        self.eos_ids = end_ids(self.tokenizer, stated_ends(config, self.generation_config))
        tags = [getattr(self.tokenizer, name, None) or "" for name in _TAGS]
        self.markup = Markup(*tags)
        self.vocabulary = Vocabulary(self.tokenizer, keep=[t for t in tags if t])

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            NoChatTemplate: it has none.
        """
        return ChatTemplate(self.tokenizer)

    def fingerprint(self) -> str:
        """A name for the model's weights. From any thread but the engine's, which works it out once."""
        if self._fingerprint is None:
            self._fingerprint = self.engine.call(lambda: fingerprint(self.engine.model, self.quantization)).result()
        return self._fingerprint

    def defaults(self, *, thinking: bool) -> Sampling:
        """The model's own sampling, or Qwen's recommendation where its files are silent."""
        source = str(self.folder / "generation_config.json")
        return sampling_defaults(self.generation_config, thinking=thinking, source=source)

    def thinks(self, ask: Ask = Ask()) -> bool:
        """Whether replies begin with a thought."""
        return self.render([{"role": "user", "content": "Hi"}], ask).opens_thinking

    def render(self, messages: Sequence[Message], ask: Ask = Ask()) -> Prompt:
        """The prompt that `chat` would read.

        Raises:
            MessageError, NoChatTemplate: the conversation cannot be written down.
        """
        if ask.tools and not self.template.traits.tools:
            raise MessageError("This model's chat template knows no tools.")
        return self.template.render(
            messages,
            tools=ask.tools,
            thinking=ask.thinking,
            options=ask.template_options,
        )

    def chat(self, messages: Sequence[Message], ask: Ask = Ask()) -> Stream:
        """Answer a conversation.

        Returns:
            The reply's events; see `swiftlet_mlx.events` for their order.

        Raises:
            MessageError, NoChatTemplate: the conversation cannot be written down.
            OptionError: an option is out of range.
            ContextFull: the prompt leaves no room for a reply.
            EngineBusy, EngineClosed: nobody is there to answer.
        """
        return self.answer(self.render(messages, ask), ask)

    def answer(self, prompt: Prompt, ask: Ask = Ask()) -> Stream:
        """Answer a conversation that `render` has written down. Raises as `chat` does."""
        markup = self.markup if ask.tools else replace(self.markup, tool_start="", tool_end="")
        reading = Reading(
            markup=markup,
            opens_thinking=prompt.opens_thinking,
            tools=ask.tools,
            parser=getattr(self.tokenizer, "tool_parser", None) if ask.tools else None,
        )
        return self._submit(list(prompt.ids), prompt.checkpoints, reading, ask, prompt)

    def preparation(self, messages: Sequence[Message], ask: Ask = Ask()) -> Request | None:
        """What reads a conversation as the next prompt will begin, in the background.

        Returns:
            The request for the engine, or None if the conversation cannot go on with a question.
        """
        ids = self.history(messages, ask)
        if not ids:
            return None
        return Request(ids=ids, consumer=_Silent(), max_tokens=0, checkpoints=(len(ids),), background=True)

    def history(self, messages: Sequence[Message], ask: Ask = Ask()) -> tuple[int, ...]:
        """What the next prompt will begin with; nothing if the conversation cannot go on with a question."""
        try:
            return self.template.history(messages, tools=ask.tools, thinking=ask.thinking, options=ask.template_options)
        except MessageError:
            return ()

    def _afterwards(self, messages: Sequence[Message], ask: Ask, reply: Reply) -> Request | None:
        """Reads a reply as history. What follows a tool call is no question, and is left to the client."""
        message = reply.message()
        return None if message is None or "tool_calls" in message else self.preparation([*messages, message], ask)

    def text(self, prompt: str | Sequence[int], ask: Ask = Ask()) -> Stream:
        """Continue plain text, or token ids, without a template: no thoughts, no tools.

        Raises:
            OptionError, ContextFull, EngineBusy, EngineClosed: as `chat` does.
        """
        if isinstance(prompt, str):
            ids = list(self.tokenizer.encode(encodable(prompt)))
        elif all(type(i) is int for i in prompt):
            ids = list(prompt)
        else:
            raise OptionError("A prompt must be text or a list of token ids.")
        return self._submit(ids, (), Reading(), ask)

    def _submit(
        self, ids: list[int], checkpoints: tuple[int, ...], reading: Reading, ask: Ask, prompt: Prompt | None = None
    ) -> Stream:
        start = encodable(ask.reply_start)
        if start:
            ids = [*ids, *self.tokenizer.encode(start, add_special_tokens=False)]
        sampling = ask.sampling or self.defaults(thinking=reading.opens_thinking)
        max_tokens = self.room(len(ids), ask.max_tokens)
        reading = replace(
            reading,
            stops=ask.stop,
            max_tokens=max_tokens,
            sentence_end=ask.sentence_end,
            begun=start,
            logprobs=ask.logprobs is not None,
        )
        reply = Reply(self.vocabulary, reading)
        return self.engine.submit(
            Request(
                ids=tuple(ids),
                consumer=reply,
                max_tokens=max_tokens,
                eos_ids=self.eos_ids,
                sampling=sampling,
                checkpoints=checkpoints,
                logprobs=ask.logprobs,
                processors=ask.processors,
                then=None if prompt is None else partial(self._afterwards, prompt.messages, ask, reply),
            )
        )

    def room(self, prompt_tokens: int, max_tokens: int | None = None) -> int:
        """How long a reply to a prompt of this length may be, at most `max_tokens`.

        Raises:
            ContextFull: not even one token.
        """
        return self.engine.room(prompt_tokens, DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens)


class _Silent:
    """A consumer for requests that generate nothing."""

    thinking_tokens = 0

    def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
        raise AssertionError("a request without tokens has sampled one")

    def finish(self, reason: FinishReason) -> tuple[Sequence[Event], Finish]:
        return (), Finish(reason)


_TAGS = ("think_start", "think_end", "tool_call_start", "tool_call_end")
