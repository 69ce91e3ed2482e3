"""JSON objects in files: the one way such a file is read, and how one is written.

Knows files, bytes and JSON; not what is inside. Invariant: no more is read than the limit, and a file that is there but
cannot be used is an error by its name, never the same as one that is not there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import SwiftletError

MAX_JSON_BYTES = 16_000_000  # far above any config, far below what would exhaust memory


def read_object(
    path: Path,
    wrong: type[SwiftletError],
    *,
    missing: type[SwiftletError] | None = None,
    advice: str = "",
    limit: int = MAX_JSON_BYTES,
) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: The file.
        wrong: What to raise for a file that cannot be used.
        missing: What to raise for one that is not there; None is `wrong` too.
        advice: What to do then: the end of every message.
        limit: The most bytes it may have.

    Raises:
        SwiftletError: `wrong` or `missing`.
    """
    found = object_if_there(path, wrong, advice=advice, limit=limit)
    if found is None:
        raise (missing or wrong)(_with(f"{path}: not found", advice))
    return found


def object_if_there(
    path: Path, wrong: type[SwiftletError], *, advice: str = "", limit: int = MAX_JSON_BYTES
) -> dict[str, Any] | None:
    """The same, or None if there is no such file. See `read_object`."""
    try:
        with open(path, "rb") as file:
            text = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise wrong(_with(f"{path} cannot be read: {error.strerror or error}", advice)) from None
    if len(text) > limit:
        raise wrong(_with(f"{path} is larger than {limit} bytes", advice))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(_with(f"{path} cannot be read: not valid JSON ({error})", advice)) from None
    if not isinstance(value, dict):
        raise wrong(_with(f"{path} holds no JSON object but {type(value).__name__}", advice))
    return value


def to_json(value: Any) -> bytes:
    """How a container's JSON files are written: the same bytes for the same value."""
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def _with(fault: str, advice: str) -> str:
    return f"{fault}; {advice}" if advice else fault
