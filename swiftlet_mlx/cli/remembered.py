"""Settings that `doctor` has found to be good on this machine, in effect for every later command.

Knows one small file, `~/.swiftlet/settings.json`, and the environment. Invariants: only variables of MLX that are
listed here are ever set, and one that the user has set stays; a file that cannot be read counts as absent.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftlet_mlx.errors import SwiftletError
from swiftlet_mlx.jsonfile import object_if_there

if TYPE_CHECKING:
    from swiftlet_mlx.reader import IO

VARIABLES = ("MLX_METAL_FAST_SYNCH", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
_MAX_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Reads:
    """How experts are best read here, and how many times as fast direct reads were as those through the page cache."""

    io: IO
    direct_times: float

    def __post_init__(self) -> None:
        if self.io not in ("cached", "direct") or not (math.isfinite(self.direct_times) and self.direct_times > 0):
            raise ValueError(f"no way to read: {self.io}, {self.direct_times}")


def path() -> Path:
    """Of the file, there or not."""
    return Path.home() / ".swiftlet" / "settings.json"


def apply() -> None:
    """Set what is remembered. To be called before mlx is imported, which reads it once."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)


def environment() -> dict[str, str]:
    """Remembered variables; empty if there is nothing usable."""
    try:
        found = _file()["environment"]
        return {k: v for k, v in found.items() if k in VARIABLES and isinstance(v, str) and v.isdigit()}
    except (KeyError, TypeError, AttributeError):
        return {}


def reads() -> Reads | None:
    """How experts are best read here; None if that was not measured."""
    try:
        found = _file()["reads"]
        return Reads(found["io"], float(found["direct_times"]))
    except (ValueError, KeyError, TypeError):
        return None


def remember(values: Mapping[str, str] | None = None, reads: Reads | None = None) -> None:
    """Keep what is given in place of what was kept before; the other part stays."""
    from swiftlet_mlx.whole import whole

    before = _file()
    kept = environment() if values is None else {k: v for k, v in values.items() if k in VARIABLES}
    found: dict[str, Any] = {"environment": kept}
    if reads is not None:
        found["reads"] = asdict(reads)
    elif "reads" in before:
        found["reads"] = before["reads"]
    path().parent.mkdir(parents=True, exist_ok=True)
    with whole(path()) as new:
        new.write_text(json.dumps(found, indent=1) + "\n")


def _file() -> dict[str, Any]:
    try:
        return object_if_there(path(), SwiftletError, limit=_MAX_BYTES) or {}
    except SwiftletError:
        return {}
