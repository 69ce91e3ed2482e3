"""What part of a growing reply may be shown, and as what: stop strings, thoughts, tool calls, answer.

Knows strings only: no tokenizer, no MLX, no threads. Invariants: nothing that could still become part of a
stop string or a tag is let out early, and nothing is lost: `finish` flushes what was held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "thinking"]

SENTENCE_ENDS = (".", "!", "?", "…", "。", "！", "？", "\n")
CLOSERS = "\"'”’)]»*_`"


# ---- stop strings
# --------------------------------------------------------------------------------------------


class StopMatcher:
    """Finds the first of several stop strings in a growing text.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Take more text, return what lies surely before any stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            # The one that was complete first ended the text: it is the one a reader would have met first.
            at, self.matched = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            out, self._held = self._held[:at], ""
            return out
        keep = _overlap(self._held, self._stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """Return what was held back; empty after a match."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, targets: Iterable[str]) -> int:
    """Length of the longest end of text that begins one of the targets without completing it."""
    best = 0
    for target in targets:
        for n in range(min(len(text), len(target) - 1), best, -1):
            if text.endswith(target[:n]):
                best = n
                break
    return best


# ---- thoughts and tool calls
# ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a reply of one kind; a tool call's text comes whole, without its tags."""

    kind: Literal["text", "thinking", "tool_call"]
    text: str
    raw: str = ""
    """For a tool call: the text with its tags, for when it turns out not to be one."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags of a model's replies. An empty tag is one the model does not have."""

    think_start: str = ""
    think_end: str = ""
    tool_start: str = ""
    tool_end: str = ""


class Splitter:
    """Sorts a growing reply into thoughts, answer and tool calls, however the tags are cut.

    Thoughts are recognised at the start of the reply only: because the prompt has opened them, or because the
    reply begins with the tag. Later tags are text, since a model may well write about them. White space next
    to a tag is markup, not content. Tool calls are recognised in the answer.

    Args:
        markup: the tags; leave the tool tags empty when no tools were offered.
        thinking: True if the prompt ends inside an opened thought.
    """

    def __init__(self, markup: Markup, thinking: bool) -> None:
        self._markup = markup
        self._state: Literal["start", "thinking", "text", "tool"] = "start"
        if thinking and markup.think_end:
            self._state = "thinking"
        elif not markup.think_start:
            self._state = "text"
        self._opened = self._state == "thinking"
        self._held = ""
        self._trim = self._opened  # newlines after a tag are dropped

    @property
    def thinking(self) -> bool:
        """True while what comes is a thought."""
        return self._state == "thinking"

    @property
    def in_tool_call(self) -> bool:
        """True inside an unfinished tool call."""
        return self._state == "tool"

    def add(self, text: str) -> list[Piece]:
        """Take more text, return the pieces that are certain now."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return [p for p in pieces if p.text or p.kind == "tool_call"]

    def finish(self) -> list[Piece]:
        """Return what was held back. A cut thought stays a thought; a cut call is text, tag and all."""
        held, self._held = self._held, ""
        if self._state == "tool":
            held = self._markup.tool_start + held
        if self._trim:
            held = held.lstrip("\n")
        kind: Kind = "thinking" if self._state == "thinking" else "text"
        if kind == "thinking":
            held = held.rstrip("\n")
        return [Piece(kind, held)] if held else []

    def _step(self, pieces: list[Piece]) -> bool:
        """One move of the machine; False when more text is needed."""
        m = self._markup
        if self._state == "start" or self._opened:
            begin = self._held.lstrip()
            if m.think_start and begin.startswith(m.think_start):
                self._held = begin[len(m.think_start) :]
                self._state, self._trim, self._opened = "thinking", True, False
                return True
            if m.think_start.startswith(begin):
                return False
            self._state, self._opened = "thinking" if self._opened else "text", False
            return True
        if self._trim:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
            self._trim = False
        if self._state == "thinking":
            if self._until(m.think_end, "thinking", pieces):
                self._state, self._trim = "text", True
                return True
            return False
        if self._state == "text":
            if m.tool_start and self._until(m.tool_start, "text", pieces):
                self._state = "tool"
                return True
            if not m.tool_start:
                pieces.append(Piece("text", self._held))
                self._held = ""
            return False
        end = self._held.find(m.tool_end)
        if end < 0:
            return False
        body = self._held[:end]
        pieces.append(Piece("tool_call", body, m.tool_start + body + m.tool_end))
        self._held = self._held[end + len(m.tool_end) :]
        self._state, self._trim = "text", True
        return True

    def _until(self, tag: str, kind: Kind, pieces: list[Piece]) -> bool:
        """Let text out up to the tag; True if the tag is there. Newlines before a tag wait with it."""
        at = self._held.find(tag)
        if at >= 0:
            pieces.append(Piece(kind, self._held[:at].rstrip("\n")))
            self._held = self._held[at + len(tag) :]
            return True
        cut = len(self._held) - _overlap(self._held, (tag,))
        cut = len(self._held[:cut].rstrip("\n"))
        pieces.append(Piece(kind, self._held[:cut]))
        self._held = self._held[cut:]
        return False


def ends_sentence(text: str) -> bool:
    """True if text ends where a sentence does, closing quotes and brackets let by."""
    return text.rstrip(CLOSERS + " ").endswith(SENTENCE_ENDS)
