"""What a person types: lines, several lines at once, a history. Standard library readline, where there is one.

Knows terminals and nothing of models. A line that ends in a backslash goes on; three double quotes open a block that
three close. A paste of several lines is one message, its last line left on the screen to be sent with Enter: Python
turns GNU readline's bracketed paste off, and libedit, which most macOS builds of Python have, knows none, so lines that
come faster than anyone types are taken together. What was typed ahead, before the prompt, stays a line a message.
A POSIX terminal is assumed (also over ssh and in tmux): waiting for a line uses select, and Ctrl-C is a signal. Windows
is not supported.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

readline: ModuleType | None
try:
    import readline
except ImportError:  # some builds of Python have none: no history, no editing, all else works
    readline = None

HISTORY_LINES = 1000
PASTE_SECONDS = 0.03
BLOCK = '"""'


def history_file() -> Path:
    """Where the lines typed are kept from one conversation to the next."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "swiftlet-mlx" / "chat_history"


class Lines:
    """Reads messages from the terminal, or lines from a pipe.

    Args:
        history: the file to keep lines in; None keeps none.
    """

    def __init__(self, history: Path | None = None) -> None:
        self.interactive = sys.stdin.isatty()
        self._edited = self.interactive and sys.stdout.isatty()
        self._history = history if self._edited and readline is not None else None
        if self._history is not None and readline is not None:
            readline.set_history_length(HISTORY_LINES)
            try:
                readline.read_history_file(self._history)
            except OSError:
                pass  # the first conversation, or an unreadable file: begin without

    def read(self, prompt: str = "> ", draft: str = "") -> str:
        """One message.

        Args:
            prompt: shown on a terminal.
            draft: put on the line to be edited.

        Raises:
            EOFError: there is no more.
            KeyboardInterrupt: Ctrl-C.
        """
        typed_ahead = self._edited and _more_typed(0)
        line = self._line(prompt, draft)
        if self._edited and not typed_ahead and not line.startswith("/"):
            line = self._pasted(line)
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip()[len(BLOCK) :])
        parts = []
        while line.endswith("\\"):
            parts.append(line[:-1])
            line = self._line("… ")
        return "\n".join([*parts, line])

    def close(self) -> None:
        """Keep the history."""
        if self._history is None or readline is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)
        except OSError:
            pass  # a home that cannot be written to is no reason to complain at the end of a talk

    def _block(self, first: str) -> str:
        lines = [first] if first else []
        while not (lines and lines[-1].rstrip().endswith(BLOCK)):
            lines.append(self._line("… "))
        lines[-1] = lines[-1].rstrip()[: -len(BLOCK)]
        return "\n".join(lines).strip("\n")

    def _pasted(self, line: str) -> str:
        lines = [line]
        try:
            while _more_typed(PASTE_SECONDS):
                lines.append(self._line("… "))
        except EOFError:  # a terminal that was closed is readable too
            pass
        return "\n".join(lines)

    def _line(self, prompt: str, draft: str = "") -> str:
        if not self._edited:
            if self.interactive:
                sys.stderr.write(prompt)
                sys.stderr.flush()
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return valid(line.rstrip("\n"))
        if readline is not None:
            readline.set_startup_hook(lambda: readline.insert_text(draft) if draft else None)
        try:
            return valid(input(prompt))
        finally:
            if readline is not None:
                readline.set_startup_hook(None)


def _more_typed(seconds: float) -> bool:
    """Whether the terminal has input that nobody has read, or gets some in this time; also less than a line."""
    with _terminal_without(line_by_line=True):
        return bool(select.select([sys.stdin], [], [], seconds)[0])


@contextmanager
def unechoed() -> Iterator[None]:
    """Keep what is typed meanwhile off the screen, a Ctrl-C's ^C too: it would push aside what is being drawn there,
    and the next drawing would not know. Nothing typed is lost: the next prompt shows it."""
    with _terminal_without():
        yield


@contextmanager
def _terminal_without(line_by_line: bool = False) -> Iterator[None]:
    """The terminal without its echo, and without waiting for whole lines if told so; nothing where there is none."""
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):  # no terminal: nothing is echoed
        yield
        return
    quiet = before[:]
    quiet[3] &= ~(termios.ECHO | (termios.ICANON if line_by_line else 0))
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def valid(text: str) -> str:
    """Bytes that are no UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
