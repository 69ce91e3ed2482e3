"""A text file as part of a message.

Knows files; no sessions. Invariant: only a whole, regular, not too large file of UTF-8 text is taken.
"""

from __future__ import annotations

from pathlib import Path

from swiftlet_mlx.errors import OptionError

from .console import size

MAX_BYTES = 1_000_000


def text_of(path: Path) -> str:
    """A file's contents.

    Raises:
        OptionError: it cannot be taken, and why.
    """
    try:
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no file.")  # a device or a pipe may have no end
        if path.stat().st_size > MAX_BYTES:
            raise OptionError(f"{path} is larger than {size(MAX_BYTES)}.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.") from None


def attachment(name: str, content: str) -> str:
    """How a file goes before a message: its name, and a code block whose fence is longer than any in it."""
    fence = "```"
    while fence in content:
        fence += "`"
    return f"{name}:\n{fence}\n{content.rstrip()}\n{fence}\n\n"
