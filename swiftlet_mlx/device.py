"""Which backend computes. Knows MLX's devices; nothing else of the package."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx


def backend() -> Literal["metal", "cuda", "cpu"]:
    """Where arrays are computed unless told otherwise."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
