"""A reply on the screen while it comes: Markdown on a terminal, the bare text in a pipe.

Knows events and rich. On a terminal, blocks that are complete are printed for good; the one that is growing is drawn
again a few times a second, no taller than the screen. Control characters in a model's text never reach the terminal.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from swiftlet_mlx.events import Event, Progress, TextDelta, ThinkingDelta

from .lines import unechoed

DRAW_SECONDS = 0.1
THOUGHT_LINES = 4
CODE_THEME = "ansi_dark"  # the terminal's own colours: readable on light and dark

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_LIST = re.compile(r"\s{0,3}([-*+]|\d{1,9}[.)])\s")


class Answer(Protocol):
    """Shows one reply."""

    def __enter__(self) -> Answer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, event: Event) -> None:
        """Take the next event."""


class PlainAnswer:
    """The text as it is, thoughts left out.

    Args:
        console: where to; its file gets the bare text.
    """

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def __enter__(self) -> PlainAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.write("\n")
        self._file.flush()

    def show(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, TextDelta):
            self._file.write(event.text)
            self._file.flush()


class LiveAnswer:
    """Markdown, drawn as it grows.

    Args:
        console: a terminal.
        fold: show thoughts only while they come, and a line about them afterwards.
    """

    def __init__(self, console: Console, *, fold: bool = True) -> None:
        self._console = console
        self._fold = fold
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._terminal = ExitStack()
        self._blocks = Blocks()
        self._thoughts = ""
        self._thinking_since: float | None = None
        self._drawn = 0.0

    def __enter__(self) -> LiveAnswer:
        self._terminal.enter_context(unechoed())
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._terminal:
            self._live.update(Text(""))
            self._end_thoughts()
            rest = self._blocks.rest()
            if rest.strip():
                self._console.print(_markdown(rest))
            self._live.stop()

    def show(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Progress):
            self._draw(_Tail(Text(f"reading {event.done:,} of {event.total:,} tokens", style="dim")))
        elif isinstance(event, ThinkingDelta):
            if self._thinking_since is None:
                self._thinking_since = time.monotonic()
            self._thoughts += printable(event.text)
            self._draw(_Tail(Text(self._thoughts, style="dim italic"), THOUGHT_LINES))
        elif isinstance(event, TextDelta):
            self._end_thoughts()
            for block in self._blocks.add(printable(event.text)):
                self._live.update(Text(""))
                self._console.print(_markdown(block))
                self._console.print()
                self._drawn = 0.0
            growing = self._blocks.rest()
            if growing.strip():
                self._draw(_Tail(_markdown(self._shortened(growing))))

    def _shortened(self, growing: str) -> str:
        """A long code block's end is enough, and laying out all of it ten times a second is too much."""
        lines = growing.split("\n")
        if len(lines) > 2 * self._console.height and _FENCE.match(lines[0]):
            return "\n".join([lines[0], *lines[-self._console.height :]])
        return growing

    def _end_thoughts(self) -> None:
        if self._thinking_since is None:
            return
        seconds = time.monotonic() - self._thinking_since
        self._thinking_since = None
        self._live.update(Text(""))
        if not self._fold:
            self._console.print(Text(self._thoughts.strip(), style="dim italic"))
        self._console.print(Text(f"(thought for {seconds:.1f} s)", style="dim"))

    def _draw(self, renderable: RenderableType) -> None:
        now = time.monotonic()
        if now - self._drawn >= DRAW_SECONDS:
            self._live.update(renderable, refresh=True)
            self._drawn = now


class Blocks:
    """Cuts growing Markdown where a block is surely over: at an empty line before a line that goes on with neither
    the same list nor, by its indentation, the same block; never inside a code block."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> list[str]:
        """Take more text, return the blocks that are complete now."""
        self._text += text
        done = []
        while (cut := self._cut()) is not None:
            done.append(self._text[:cut].strip("\n"))
            self._text = self._text[cut:].lstrip("\n")
        return [block for block in done if block.strip()]

    def rest(self) -> str:
        """The block that is still growing."""
        return self._text

    def _cut(self) -> int | None:
        fence, empty, in_list, at = "", False, False, 0
        for line in self._lines():
            mark = _FENCE.match(line)
            if fence:
                if mark and mark[1].startswith(fence) and not line.strip(" \n`~"):
                    fence = ""
            elif not line.strip():
                empty = at > 0
            else:
                if empty and not line[0].isspace() and not (in_list and _LIST.match(line)):
                    return at
                empty = False
                fence = mark[1] if mark else ""
                in_list = bool(_LIST.match(line)) or (in_list and line[0].isspace())
            at += len(line)
        return None

    def _lines(self) -> Iterator[str]:
        """Lines, the last one only once it says what it is: its first four characters, or its end."""
        lines = self._text.splitlines(keepends=True)
        for i, line in enumerate(lines):
            if i < len(lines) - 1 or line.endswith("\n") or len(line) >= 4:
                yield line


class _Tail:
    """The last lines of something, so that it fits below what is printed already, and an empty one for the cursor.

    A terminal echoes Ctrl-C as ^C where the cursor stands; at the end of a full line that would begin another line,
    which the next drawing would not know of.
    """

    def __init__(self, inner: RenderableType, n_lines: int | None = None) -> None:
        self._inner = inner
        self._n_lines = n_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(1, console.height - 3)
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        for line in lines[-min(self._n_lines or room, room) :]:
            yield from line
            yield Segment.line()
        yield Segment(" ")


def printable(text: str) -> str:
    """Text that cannot command a terminal: control characters become their visible pictures."""
    return _CONTROL.sub(lambda m: chr(0x2400 + ord(m[0])) if ord(m[0]) < 0x20 else "\ufffd", text)


def _markdown(text: str) -> Markdown:
    # Addresses are shown, not hidden behind words that a model chose.
    return Markdown(text, code_theme=CODE_THEME, hyperlinks=False)
