"""The small models that the tests of the benchmark measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from swiftlet_bench import shapes
from swiftlet_bench.synthetic import make_container

TINY: dict[str, Any] = {"config": shapes.preset("tiny"), "group_size": 32, "dtype": mx.float32, "tokenizer": True}


def tiny(folder: Path) -> Path:
    """A synthetic container of four layers with sixteen experts, in milliseconds."""
    return make_container(folder / "tiny.qpack", **TINY)
