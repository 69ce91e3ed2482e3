"""What the studies of one part print: JSON objects, one a line, and in one of them what holds for all the others.

Knows the machine and the versions; measures nothing. studies.py makes tables of such lines. Invariant: a line is out
before the next measurement begins, so that a run that is broken off has said what it had.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx


def setting(model: Path, **more: Any) -> dict[str, Any]:
    """The line that the others are to be read with.

    Args:
        model: Its folder, of which only the name is said.
        more: What was set for this study.
    """
    return {
        "case": "setting", "model": model.name, "device": str(mx.default_device()), "machine": platform.machine(),
        "system": platform.system(), "cores": os.cpu_count(), "mlx": version("mlx"), "mlx_lm": version("mlx-lm"),
        **more,
    }  # fmt: skip


def say(also: Path | None = None, /, **line: Any) -> None:
    """Print a line.

    Args:
        also: A file to append it to.
        line: Its names and values.
    """
    text = json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in line.items()})
    print(text, flush=True)
    if also is not None:
        with also.open("a") as file:
            file.write(text + "\n")
