"""What was said since a conversation's file was last written: messages in a small file beside it.

The file itself holds caches and may be hundreds of megabytes; this one is written after every turn, in milliseconds,
so that a kill or a power cut costs no words, only the reading of what is not in the caches. Knows JSON and files; no
MLX. Invariant: it counts only beside the very file it was begun beside (or beside none, where there was none), so that
one left behind never brings back what has been undone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SafetensorsError, SessionFileError
from .safetensors import read_header
from .whole import whole

VERSION = 2
SUFFIX = ".unsaved"
MAX_BYTES = 1 << 30  # far above any context


@dataclass(frozen=True, slots=True)
class Unsaved:
    """What a sidecar says."""

    path: Path
    model: str
    messages: list[dict[str, Any]]


def beside(path: Path) -> Path:
    """The sidecar's name."""
    return path.with_name(path.name + SUFFIX)


def write(path: Path, messages: Sequence[Mapping[str, Any]], model: str) -> None:
    """Note what was said beside a conversation's file.

    Args:
        path: the conversation's file, there or not.
        messages: the whole conversation.
        model: `sessionfile.fingerprint` of its model.

    Raises:
        SessionFileError: it cannot be written.
    """
    record = {"version": VERSION, "model": model, "beside": _identity(path), "messages": list(messages)}
    try:
        with whole(beside(path)) as new:
            new.write_text(json.dumps({**record, "sha256": _seal(record)}), encoding="ascii")
    except OSError as error:
        raise SessionFileError(f"What was said cannot be noted in {beside(path)}: {error.strerror}") from error


def read(path: Path) -> Unsaved | None:
    """What was noted beside a conversation's file, if it still counts.

    Raises:
        SessionFileError: it is damaged.
    """
    name = beside(path)
    try:
        if name.stat().st_size > MAX_BYTES:
            raise ValueError("it is far too large")
        record = json.loads(name.read_bytes())
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']!r}, this program knows {VERSION}")
        if record.pop("sha256") != _seal(record):
            raise ValueError("what it says does not match its hash")
        messages = record["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise TypeError("messages")
        found = Unsaved(name, str(record["model"]), messages)
        counts = record["beside"] == _identity(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SessionFileError(
            f"{name} is damaged ({error}). It held what was said after {path.name} was written. Remove it to go on "
            "without that."
        ) from error
    return found if counts else None


def drop(path: Path) -> None:
    """Forget what was noted: the file now holds it."""
    beside(path).unlink(missing_ok=True)


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _identity(path: Path) -> str | None:
    """What tells one writing of a conversation's file from another; None for no file."""
    if not path.exists():
        return None
    try:
        header = read_header(path)
    except SafetensorsError:
        return "unreadable"  # whoever opens it will say so
    return hashlib.sha256(json.dumps(header.metadata, sort_keys=True).encode()).hexdigest()
