"""One reply's tokens as events: text, thoughts, tool calls, and the reason to stop.

Knows text, events and parsers; runs on the engine thread but touches no MLX. Invariant: every token's text
comes out in exactly one event, or is a tag, or lies behind a stop string.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .detokenizer import Vocabulary
from .events import Event, Finish, FinishReason, TextDelta, ThinkingDelta, TokenLogprob, ToolCall
from .generation import Token
from .text import Markup, Piece, Splitter, StopMatcher, ends_sentence
from .toolcalls import Parser, Tools, parse_calls

NEARLY_USED = 0.1  # with `sentence_end`, a sentence that ends in the last tenth of the budget ends the reply
NEARLY_USED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a reply.

    Args:
        markup: the model's tags; all empty for plain text.
        opens_thinking: the prompt ends inside a thought.
        tools: tools that were offered.
        parser: reads the model's tool calls; None if there are no tools.
        stops: strings that end the reply.
        max_tokens: the budget, for `sentence_end`.
        sentence_end: rather end after a whole sentence than in the middle of the next when the budget is
            nearly used up.
        begun: text the reply has been made to begin with; it is part of it.
        logprobs: report log-probabilities.
    """

    markup: Markup = field(default_factory=Markup)
    opens_thinking: bool = False
    tools: Tools = ()
    parser: Parser | None = None
    stops: tuple[str, ...] = ()
    max_tokens: int = 0
    sentence_end: bool = False
    begun: str = ""
    logprobs: bool = False


def assistant_message(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A finished reply as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in calls
        ]
    return message


class Reply:
    """A Consumer for the engine. One reply, then done."""

    def __init__(self, vocabulary: Vocabulary, reading: Reading) -> None:
        self._vocabulary = vocabulary
        self._reading = reading
        self._detokenizer = vocabulary.detokenizer()
        self._stops = StopMatcher(reading.stops)
        self._splitter = Splitter(reading.markup, reading.opens_thinking)
        self._begun = self._splitter.add(reading.begun)
        self._shown = ""  # the end of the answer so far, for sentence ends
        self._pending: list[TokenLogprob] = []
        self._n_tokens = 0
        self._n_thinking = 0
        self._n_calls = 0
        self._said: list[Event] = []

    @property
    def thinking_tokens(self) -> int:
        """How many of the tokens so far were thoughts."""
        return self._n_thinking

    def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
        """Take a token; see generation.Consumer."""
        self._n_tokens += 1
        self._n_thinking += self._splitter.thinking
        if self._reading.logprobs:
            self._pending.append(self._logprob(token))
        begun, self._begun = self._begun, []
        events = self._events([*begun, *self._splitter.add(self._stops.add(self._detokenizer.add(token.id)))])
        if self._stops.matched is not None:
            return events, "stop"
        return events, "length" if self._at_last_sentence() else None

    def finish(self, reason: FinishReason) -> tuple[Sequence[Event], Finish]:
        """Flush; see generation.Consumer."""
        rest = self._stops.add(self._detokenizer.finish()) + self._stops.finish()
        begun, self._begun = self._begun, []
        events = self._events([*begun, *self._splitter.add(rest), *self._splitter.finish()])
        if self._n_calls and reason == "stop" and self._stops.matched is None:
            reason = "tool_calls"
        return events, Finish(reason, self._stops.matched)

    def _events(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if piece.kind == "tool_call":
                events += self._calls(piece)
            elif piece.kind == "thinking":
                events.append(ThinkingDelta(piece.text, self._take_logprobs()))
            else:
                events.append(self._text(piece.text))
        self._said += events
        return events

    def message(self) -> dict[str, Any] | None:
        """The reply so far as a message of the conversation; None if it holds no answer."""
        text = "".join(e.text for e in self._said if isinstance(e, TextDelta))
        thinking = "".join(e.text for e in self._said if isinstance(e, ThinkingDelta))
        calls = [e for e in self._said if isinstance(e, ToolCall)]
        return assistant_message(text, thinking, calls) if text or calls else None

    def _text(self, text: str) -> TextDelta:
        self._shown = (self._shown + text)[-16:]
        return TextDelta(text, self._take_logprobs())

    def _calls(self, piece: Piece) -> list[Event]:
        try:
            if self._reading.parser is None:
                raise ValueError("no parser")
            calls = parse_calls(piece.text, self._reading.parser, self._reading.tools)
        except ValueError:
            return [self._text(piece.raw)]  # not a call: the reader sees what the model wrote
        events: list[Event] = []
        for name, arguments in calls:
            text = json.dumps(arguments, ensure_ascii=False)
            events.append(ToolCall(self._n_calls, f"call_{secrets.token_hex(12)}", name, text))
            self._n_calls += 1
        return events

    def _at_last_sentence(self) -> bool:
        if not self._reading.sentence_end or self._splitter.thinking or self._splitter.in_tool_call:
            return False
        left = self._reading.max_tokens - self._n_tokens
        near = min(NEARLY_USED_TOKENS, int(self._reading.max_tokens * NEARLY_USED))
        return left <= near and ends_sentence(self._shown)

    def _take_logprobs(self) -> tuple[TokenLogprob, ...]:
        taken, self._pending = tuple(self._pending), []
        return taken

    def _logprob(self, token: Token) -> TokenLogprob:
        top = tuple(self._named(i, p) for i, p in token.top)
        return self._named(token.id, token.logprob or 0.0, top)

    def _named(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._vocabulary.token_bytes(token)
        return TokenLogprob(token, raw.decode("utf-8", "replace"), raw, logprob, top)
