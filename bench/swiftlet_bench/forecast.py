"""A prediction for a model that is here: its shape, the rates of this device, and the disk its own files lie on.

Knows the model's folder; measures for a few seconds and loads nothing. Invariant: what is measured is what streaming
does: reads of an expert's size from the model's largest file, products in the experts' own width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import io, predict, rates

_TYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True, slots=True)
class Here:
    """What decides a model's speed on this machine; `disk` is bytes a second."""

    shape: predict.Shape
    rates: rates.Rates
    disk: float
    cold: bool

    def at(self, cache_bytes: int, hit_rate: float | None = None) -> predict.Prediction:
        """The prediction for a cache, with the hit rate that was measured if one is given."""
        curve = predict.CURVE if hit_rate is None else ((0.0, hit_rate), (1.0, hit_rate))
        return predict.predict(self.shape, cache_bytes, self.rates, self.disk, curve, assumed=hit_rate is None)

    def in_words(self) -> str:
        """The formula and the numbers that went into it."""
        return (
            f"{predict.FORMULA}\n"
            f"weights {self.rates.weights / 1e9:.2f} GB/s, read-back {self.rates.read_back * 1e3:.3f} ms, host work "
            f"{predict.HOST_SECONDS * 1e3:.2f} ms a layer, {'disk' if self.cold else 'page cache'} "
            f"{self.disk / 1e9:.2f} GB/s"
        )

    def report(self, found: Sequence[predict.Prediction]) -> Mapping[str, Any]:
        """The same for programs."""
        return {
            "formula": predict.FORMULA,
            "weight_bytes_per_second": self.rates.weights,
            "read_back_seconds": self.rates.read_back,
            "host_seconds_per_layer": predict.HOST_SECONDS,
            "disk_bytes_per_second": self.disk,
            "page_cache": "cold" if self.cold else "warm",
            "predictions": [{**asdict(p), "tokens_per_second": p.tokens_per_second} for p in found],
        }


def measure(
    folder: Path,
    *,
    cold: bool = True,
    disk: float | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Here:
    """Measure what a prediction needs.

    Args:
        folder: A container or checkpoint folder.
        cold: Read from the disk; else from the page cache.
        disk: Bytes a second, if they are known; nothing is read then.
        progress: Called with runs done, runs in all, and the case.

    Raises:
        SwiftletError: the folder is no model that can be streamed, or its files cannot be read.
    """
    shape = predict.shape_here(folder)
    bits, tag = predict.width_here(folder)
    if disk is None:
        case = max(folder.rglob("*.bin"), key=_size, default=None) or max(folder.glob("*.safetensors"), key=_size)
        size = min(shape.expert_bytes, _size(case))
        found = io.measure(case, sizes=(size,), threads=(1, 4, 8), states=(cold,), progress=progress)
        disk = io.bandwidth(found, size, cold)
    return Here(shape, rates.measure(bits, _TYPES.get(tag, mx.float32)), disk, cold)


def _size(path: Path) -> int:
    return path.stat().st_size
