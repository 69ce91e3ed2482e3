"""Settings that `doctor` has found to be good on this machine, in effect for every later command.

Knows one small file, `~/.swiftlet/settings.json`, and the environment. Invariants: only variables of MLX that are
listed here are ever set, and one that the user has set stays; a file that cannot be read counts as absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("MLX_METAL_FAST_SYNCH", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
_MAX_BYTES = 100_000


def path() -> Path:
    return Path.home() / ".swiftlet" / "settings.json"


def apply() -> None:
    """Set what is remembered. To be called before mlx is imported, which reads it once."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)


def environment() -> dict[str, str]:
    """What is remembered; empty if there is nothing usable."""
    try:
        if path().stat().st_size > _MAX_BYTES:
            return {}
        found = json.loads(path().read_bytes())["environment"]
        return {k: v for k, v in found.items() if k in VARIABLES and isinstance(v, str) and v.isdigit()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def remember(values: Mapping[str, str]) -> None:
    """Keep these variables, in place of all that were kept before."""
    path().parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": {k: v for k, v in values.items() if k in VARIABLES}}, indent=1)
    part = path().with_suffix(".partial")
    part.write_text(text + "\n")
    os.replace(part, path())
