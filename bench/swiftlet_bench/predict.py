"""How fast a model should be here, before it is downloaded: a formula of five numbers, shown with its result.

    seconds a token = touched bytes / weight rate  +  layers x (read-back + host work)  +  missed bytes / disk rate

Knows shapes and rates; no model is loaded. The rates are measured here (rates.py, io.py), the miss rate is taken from
public measurements of real routing unless a curve measured with `cache-curve` is given. Invariant: a prediction
carries its terms, so that one that is wrong shows where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlet_mlx.config import ModelConfig, read_config, text_config
from swiftlet_mlx.qpack import DENSE, Container
from swiftlet_mlx.reader import open_source
from swiftlet_mlx.safetensors import read_header

from .rates import Rates

FORMULA = "seconds a token = touched bytes / weight rate + layers x (read-back + host work) + missed bytes / disk rate"
# Python and graph building a layer, beyond the read-back, by the clock: 0.14 ms with hits only, 0.24 about a miss on
# two slow cores (bench/LOG.md, 2026-12-01). This leaves a prediction rather too low.
HOST_SECONDS = 0.35e-3
# Share of all experts that the cache holds, and how many of a token's experts it then has. From public measurements of
# Qwen 35B on a Mac: 43 % -> 91.7 %, 64 % -> 94.8 %, 86 % -> 96.4 %; and from the 35 to 43 % of a token's experts
# that the token before has used, which is what a cache of one token's experts finds.
CURVE = ((0.0, 0.0), (0.03, 0.38), (0.10, 0.62), (0.25, 0.82), (0.43, 0.917), (0.64, 0.948), (0.86, 0.964), (1.0, 1.0))


@dataclass(frozen=True, slots=True)
class Shape:
    """What a token touches. `dense_bytes` are those of the weights that every token uses (embeddings not counted)."""

    name: str
    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    dense_bytes: int

    @property
    def all_experts_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.layers * self.experts * self.expert_bytes

    @property
    def cycle_bytes(self) -> int:
        """Bytes of the experts of one token."""
        return self.layers * self.top_k * self.expert_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one token by their cause. `assumed`: the hit rate is that of other models, not one measured here."""

    cache_bytes: int
    hit_rate: float
    compute_seconds: float
    host_seconds: float
    read_seconds: float
    read_bytes: float
    assumed: bool = True

    @property
    def tokens_per_second(self) -> float:
        return 1 / (self.compute_seconds + self.host_seconds + self.read_seconds)


def predict(
    shape: Shape,
    cache_bytes: int,
    rates: Rates,
    disk: float,
    curve: Sequence[tuple[float, float]] = CURVE,
    assumed: bool = True,
) -> Prediction:
    """Predict decoding.

    Args:
        shape: Of the model.
        cache_bytes: For experts.
        rates: Of this machine.
        disk: Bytes a second, for reads of an expert's size.
        curve: (share of experts held, hit rate), ascending.
        assumed: Whether the curve is that of other models.
    """
    held = min(1.0, cache_bytes / shape.all_experts_bytes)
    hit_rate = interpolate(curve, held)
    missed = shape.cycle_bytes * (1 - hit_rate)
    resident = held >= 1.0  # then no router's choice has to be read back
    return Prediction(
        cache_bytes=cache_bytes,
        hit_rate=hit_rate,
        compute_seconds=(shape.dense_bytes + shape.cycle_bytes) / rates.weights,
        host_seconds=rates.read_back if resident else shape.layers * (rates.read_back + HOST_SECONDS),
        read_seconds=missed / disk,
        read_bytes=missed,
        assumed=assumed,
    )


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """The straight line between the two points around `x`; the ends go on level."""
    before = (0.0, curve[0][1]) if not curve[0][0] else curve[0]
    for point in curve:
        if x <= point[0]:
            width = point[0] - before[0]
            return point[1] if width <= 0 else before[1] + (point[1] - before[1]) * (x - before[0]) / width
        before = point
    return curve[-1][1]


def shape_of(name: str, config: Mapping[str, Any], bits: int | None = 4, group_size: int = 64) -> Shape:
    """The shape of a model that is not here, from its config.

    Args:
        name: For the table.
        config: As published.
        bits: Of its quantization; None for 16-bit weights.
        group_size: Of its quantization, with 16-bit scales and biases.
    """
    shape, text = ModelConfig.from_dict(config, name), text_config(config)
    each = 2.0 if bits is None else bits / 8 + 4 / group_size
    hidden = text["hidden_size"]
    inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    return Shape(
        name=name,
        layers=shape.layer_count,
        experts=shape.expert_count,
        top_k=shape.top_k,
        expert_bytes=round(3 * hidden * inner * each),
        dense_bytes=round(_dense_weights(shape, text) * each),
    )


def _dense_weights(shape: ModelConfig, text: Mapping[str, Any]) -> float:
    """Weights besides routed experts that a token's pass multiplies with."""
    hidden, head = text["hidden_size"], text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    attention = hidden * (2 * queries if "linear_num_value_heads" in text else queries) + 2 * hidden * keys
    attention += queries * hidden
    linear = 0.0
    if any(shape.linear_layers):
        key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        value = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        linear = hidden * (2 * key + 2 * value + 2 * text["linear_num_value_heads"]) + value * hidden
    n_linear = sum(shape.linear_layers)
    shared = 3 * hidden * (text.get("shared_expert_intermediate_size") or 0)
    router = hidden * shape.expert_count
    per_layer = shared + router
    layers = n_linear * linear + (shape.layer_count - n_linear) * attention + shape.layer_count * per_layer
    return float(layers + hidden * text["vocab_size"])


def shape_here(folder: Path) -> Shape:
    """The shape of a model that is on this machine, from its headers.

    Raises:
        SwiftletError: it is not a model that can be streamed.
    """
    source, opened = open_source(folder)
    source.close()
    config = ModelConfig.from_dict(read_config(folder), str(folder))
    if isinstance(opened, Container):
        dense = {name: t.nbytes for name, t in read_header(folder / DENSE).tensors.items()}
    else:
        dense = {name: at.info.nbytes for name, at in opened.dense.items()}
    table = max(source.tables.values(), key=lambda t: t.payload_bytes)
    used = sum(n for name, n in dense.items() if config.tied or ".embed_tokens." not in f".{name}")
    return Shape(folder.name, len(source.tables), table.expert_count, config.top_k, table.payload_bytes, used)


def width_here(folder: Path) -> tuple[int | None, str]:
    """How a model's experts are stored: bits of the quantization (None for plain), dtype tag of what is not packed."""
    source, _ = open_source(folder)
    source.close()
    table = next(iter(source.tables.values()))
    sections = {s.name: s for s in table.sections}
    scales = next((s for name, s in sections.items() if name.endswith(".scales")), None)
    weight = next(s for name, s in sections.items() if name.endswith(".weight"))
    if scales is None:
        return None, weight.dtype
    bits = read_config(folder).get("quantization", {}).get("bits")
    return (bits if bits in (2, 3, 4, 5, 6, 8) else 4), scales.dtype
