"""A conversation written down for the model: messages checked, template applied, ids, and where it may part
again.

Knows chat templates and tokenizers; no MLX, no streaming. What a template can do is found out once by trying
it on small conversations, not by its name. Invariant: the ids are a function of the arguments alone.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import MessageError, NoChatTemplate
from .messages import Message, checked_messages, encodable

MIN_SHARED_TOKENS = 64  # a shorter beginning is not worth a checkpoint and a pass over the experts of its own
MARK = "zqx"  # appears in no template


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    text: str
    ids: tuple[int, ...]
    opens_thinking: bool
    """The prompt ends inside a thought, so the reply begins with one."""
    checkpoints: tuple[int, ...]
    """Offsets into ids: the end of the system prompt and tools, if they are worth it, and where the next
    turn goes on."""
    messages: tuple[Message, ...] = ()
    """The conversation that was rendered."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template was found to accept."""

    system: bool
    system_anywhere: bool
    developer: bool
    tools: bool
    arguments_as_text: bool
    """Arguments of earlier tool calls must be JSON text, not an object."""


class ChatTemplate:
    """Renders conversations for one tokenizer. Usable from several threads.

    Args:
        tokenizer: mlx-lm's wrapper, or a Hugging Face tokenizer with a chat template.

    Raises:
        NoChatTemplate: it has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        has = getattr(tokenizer, "has_chat_template", None)
        if not (tokenizer.chat_template is not None if has is None else has):
            raise NoChatTemplate(
                "This model has no chat template, so it cannot hold a conversation. Use `generate` with a "
                "plain prompt, or add chat_template.jinja from the model's page to its folder."
            )
        self._tokenizer = tokenizer
        self._lock = threading.RLock()
        self.think_start: str = getattr(tokenizer, "think_start", None) or ""
        self.think_end: str = getattr(tokenizer, "think_end", None) or ""
        self._shared: OrderedDict[str, int] = OrderedDict()
        self.traits = self._find_traits()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        options: Mapping[str, Any] | None = None,
        reply: bool = True,
    ) -> Prompt:
        """Write a conversation down.

        Args:
            messages: the conversation, oldest first.
            tools: tools the model may call, in OpenAI's form.
            thinking: False keeps the model from thinking first, also where the template always opens a
                thought; None leaves it to the template.
            options: more variables for the template.
            reply: end with the opening of the assistant's turn. Without it the prompt ends after the last
                message.

        Raises:
            MessageError: a message is not well-formed, or the template refuses the conversation.
        """
        checked = self._fitted(checked_messages(messages))
        given = dict(options or {})
        if thinking is not None:
            given["enable_thinking"] = thinking
        with self._lock:
            text = self._apply(checked, tools, given, reply)
            opens = reply and self._opens(checked, tools, given, text)
            if opens and thinking is False:
                text, opens = text.rstrip("\n") + f"\n\n{self.think_end}\n\n", False
            ids = self._encode(text)
            marks = self._marks(checked, tools, given, text, ids, reply)
        return Prompt(text, tuple(ids), opens, marks, tuple(messages))

    def history(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The ids that the prompt begins with when the user speaks next, whatever is said.

        Not the rendering of the messages alone: a template may show the last reply's thoughts until then.

        Raises:
            MessageError: as `render` does.
        """
        given = dict(options or {})
        if thinking is not None:
            given["enable_thinking"] = thinking
        asked = [[*messages, {"role": "user", "content": c}] for c in ("0" + MARK, "." + MARK)]
        with self._lock:
            one, two = (self._apply(self._fitted(checked_messages(m)), tools, given) for m in asked)
            ids = self._encode(one)
            return tuple(ids[: self._offset(one, ids, _common(one, two))])

    def encode(self, text: str) -> list[int]:
        """The ids of a text that continues a prompt: no beginning-of-sequence token is added."""
        with self._lock:
            return self._encode(text)

    # ---- rendering
    # -------------------------------------------------------------------------------------------

    def _apply(self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any], reply: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=reply, **options
            )
        except Exception as error:  # a template may raise anything
            raise MessageError(f"The model's chat template refuses this conversation: {error}") from error
        return encodable(str(text))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _opens(self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any], text: str) -> bool:
        """Whether the opening of the reply, and it alone, leaves a thought open."""
        if not self.think_start or not text.rstrip().endswith(self.think_start):
            return False
        history = self._apply(messages, tools, options, reply=False)
        opening = text[len(history) :] if text.startswith(history) else text
        return opening.rstrip().endswith(self.think_start)

    def _fitted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same conversation in roles and forms that the template accepts."""
        traits = self.traits
        out: list[dict[str, Any]] = []
        merged: list[str] = []
        for message in messages:
            message = dict(message)
            if message["role"] == "developer" and not traits.developer:
                message["role"] = "system"
            if message["role"] in ("system", "developer") and not (traits.system_anywhere and traits.system):
                merged.append(message["content"])
                continue
            if message.get("tool_calls") and traits.arguments_as_text:
                message["tool_calls"] = [
                    {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
                    for c in message["tool_calls"]
                ]
            out.append(message)
        text = "\n\n".join(m for m in merged if m)
        if not merged:
            return out
        if traits.system:
            return [{"role": "system", "content": text}, *out]
        for i, message in enumerate(out):
            if message["role"] == "user":
                out[i] = {
                    **message,
                    "content": f"{text}\n\n{message['content']}" if text else message["content"],
                }
                return out
        return [{"role": "user", "content": text}, *out]

    # ---- where conversations part
    # ----------------------------------------------------------------------------

    def _marks(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        options: Mapping[str, Any],
        text: str,
        ids: list[int],
        reply: bool,
    ) -> tuple[int, ...]:
        marks = {len(ids)}
        if reply:
            history = self._apply(messages, tools, options, reply=False)
            here = _common(text, history)
            later = self._goes_on(messages, tools, options, text)
            # The header of the reply belongs to what is kept. Where a new question strips earlier thoughts (after
            # tool calls), the place of the next tool result is worth a mark of its own.
            marks = {self._offset(text, ids, at) for at in ({later} if later >= here else {later, here})}
        shared = self._shared_tokens(messages, tools, options)
        if shared >= MIN_SHARED_TOKENS:
            marks.add(shared)
        return tuple(sorted(m for m in marks if 0 < m <= len(ids)))

    def _goes_on(self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any], text: str) -> int:
        """How much of a prompt's text the prompt after the next question begins with, whatever is answered."""
        found = len(text)
        for answer in ("0" + MARK, "." + MARK):
            turn = [{"role": "assistant", "content": answer}, {"role": "user", "content": MARK}]
            try:
                found = min(found, _common(text, self._apply([*messages, *turn], tools, options)))
            except MessageError:
                return 0
        return found

    def _offset(self, text: str, ids: list[int], at: int) -> int:
        """How many of the ids lie before a place in the text, found from what comes after it where that is possible:
        counting tokens takes longer than rendering them, and most of a conversation is before its last turn."""
        rest = self._encode(text[at:]) if at < len(text) else []
        if ids[len(ids) - len(rest) :] == rest:
            return len(ids) - len(rest)
        return _common(ids, self._encode(text[:at]))

    def _shared_tokens(self, messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]) -> int:
        """How many tokens every conversation with this system prompt and these tools begins with."""
        system = [m for m in messages[:1] if m["role"] in ("system", "developer")]
        key = json.dumps([system, tools, dict(options)], sort_keys=True, default=str)
        if key not in self._shared:
            try:
                one, two = (
                    self._encode(self._apply([*system, {"role": "user", "content": c}], tools, options))
                    for c in ("0" + MARK, "." + MARK)
                )
                self._shared[key] = _common(one, two)
            except MessageError:
                self._shared[key] = 0
            while len(self._shared) > 64:
                self._shared.popitem(last=False)
        return min(self._shared[key], 10**9)

    # ---- finding out
    # -----------------------------------------------------------------------------------------

    def _find_traits(self) -> Traits:
        user: dict[str, Any] = {"role": "user", "content": "u"}
        answer: dict[str, Any] = {"role": "assistant", "content": "a"}
        marked = {"role": "system", "content": MARK}

        def shows(messages: list[dict[str, Any]], mark: str = MARK, tools: Any = None, **options: Any) -> bool:
            try:
                return mark in self._apply(messages, tools, options)
            except MessageError:
                return False

        tool = {"type": "function", "function": {"name": MARK, "description": "d", "parameters": {}}}
        call = {"id": "c", "type": "function", "function": {"name": "n", "arguments": {MARK: 1}}}
        called: list[dict[str, Any]] = [
            user,
            {**answer, "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "t"},
        ]
        system = shows([marked, user])
        return Traits(
            system=system,
            system_anywhere=system and shows([user, answer, marked, user]) and shows([user, marked]),
            developer=shows([{**marked, "role": "developer"}, user])
            and shows([user, answer, {**marked, "role": "developer"}, user]),
            tools=shows([user], tools=[tool]),
            arguments_as_text=not shows(called)
            and shows([user, {**called[1], "tool_calls": [_with_text(call)]}, called[2]]),
        )


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}


def _common(one: Sequence[object], two: Sequence[object]) -> int:
    """How long the beginning is that both share."""
    n = min(len(one), len(two))
    if one[:n] == two[:n]:
        return n
    return next(i for i in range(n) if one[i] != two[i])
