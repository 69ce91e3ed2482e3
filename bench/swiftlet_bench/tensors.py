"""Every tensor of a synthetic model: its name, its shape, and where its bytes come from.

Names and shapes are those of the model that mlx-lm builds, which is never evaluated; the numbers come from weights.py.
Knows no files. Invariant: bytes are made when they are asked for, piece by piece, and are the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from swiftlet_mlx._compat import get_model_classes
from swiftlet_mlx.config import text_config
from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.layout import LayerTable, make_table
from swiftlet_mlx.safetensors import tensor_bytes

from . import weights
from .shapes import nested
from .weights import Format

_SLICE = 64  # experts' bytes begin at multiples of this in the pools of random numbers
_POOL_BYTES = 24 << 20  # beyond the largest section: how many different slices there can be
_TAGS = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_GATES = ("mlp.gate", "shared_expert_gate")  # 8 bits whatever the rest is, as mlx-lm converts them

Blocks = Iterator[NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: where its bytes come from."""

    name: str
    tag: str
    shape: tuple[int, ...]
    blocks: Callable[[], Blocks]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.tag, self.shape)


class Model:
    """Names, shapes and sources of all tensors of one synthetic model."""

    def __init__(
        self, config: Mapping[str, Any], bits: int | None, group_size: int, dtype: mx.Dtype, seed: int
    ) -> None:
        if bits not in (4, 8, None) or dtype not in _TAGS:
            raise OptionError(f"bits can be 4, 8 or none and dtype bfloat16, float16 or float32, not {bits}, {dtype}")
        self.format = Format(bits, group_size, _TAGS[dtype])
        self.seed = seed
        config = nested(config)
        text = text_config(config)
        self.vocab, self.top_k = int(text["vocab_size"]), int(text.get("num_experts_per_tok", 1))
        self.origin = f"synthetic: random weights, seed {seed}"
        model_class, args = get_model_classes(dict(config))
        built = model_class(args.from_dict(json.loads(json.dumps(config))))  # lazy: nothing of it is ever computed
        self.linear = tuple(bool(getattr(layer, "is_linear", False)) for layer in built.layers)
        flat: Any = tree_flatten(built.parameters())
        shapes = {name: tuple(int(n) for n in value.shape) for name, value in sorted(flat)}
        self.layers = len(built.layers)
        self.routed: dict[int, str] = {}  # layer to the path of its switch layer
        experts: dict[str, tuple[int, int, int]] = {}
        for name, shape in shapes.items():
            if ".switch_mlp." in name:
                path, projection, _ = name.rsplit(".", 2)
                layer = int(path.split("layers.")[1].split(".")[0])
                self.routed[layer] = path
                experts[projection] = (shape[0], shape[1], shape[2])
        if sorted(self.routed) != list(range(self.layers)) or sorted(experts) != sorted(_PROJECTIONS):
            raise OptionError("only models whose every layer has gated experts can be made")
        self.experts = _Experts(experts, self.format, seed, weights.write_gain("experts", self.layers, self.top_k))
        count = experts["gate_proj"][0]
        self.tables = {n: make_table(n, count, self.experts.parts()) for n in range(self.layers)}
        self.overrides: dict[str, Any] = {}
        dense = [t for name, shape in shapes.items() if ".switch_mlp." not in name for t in self._dense(name, shape)]
        self.dense = sorted(dense, key=lambda t: t.name)
        self.config = {**config, "synthetic": {"seed": seed, "note": "random weights; the output means nothing"}}
        if bits:
            width = {"group_size": group_size, "bits": bits, **self.overrides}
            self.config |= {"quantization": width, "quantization_config": width}

    def stacked(self, layer: int) -> list[Tensor]:
        """A layer's experts as a checkpoint keeps them: one tensor a section."""
        table = self.tables[layer]
        tensors = []
        for index, section in enumerate(table.sections):

            def blocks(index: int = index) -> Blocks:
                return (rows[index] for rows in self.experts.each(layer, table.expert_count))

            shape = (table.expert_count, *section.shape)
            tensors.append(Tensor(f"{self.routed[layer]}.{section.name}", section.dtype, shape, blocks))
        return sorted(tensors, key=lambda t: t.name)

    def _dense(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        f, seed = self.format, self.seed
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2:
            yield self._small(name, shape)
            return
        rows, width = shape
        deviation, kind = self._deviation(module, width)
        gate = module.endswith(_GATES)
        bits = 8 if gate and f.bits else f.bits
        if module.endswith("mlp.gate"):
            kind = "router"
        if bits is None:
            yield Tensor(name, f.tag, shape, lambda: self._unquantized(name, rows, width, deviation, kind))
            return
        if width % f.group_size:
            raise OptionError(f"{name}: a width of {width} cannot be quantized in groups of {f.group_size}")
        if gate:
            self.overrides[module] = {"group_size": f.group_size, "bits": 8}
        shapes = {"weight": ("U32", (rows, width * bits // 32))}
        shapes |= dict.fromkeys(("scales", "biases"), (f.tag, (rows, width // f.group_size)))
        for part, (tag, own) in shapes.items():
            if kind == "router":
                blocks = partial(self._quantized_router, name, rows, width, part)
            elif part == "weight":
                blocks = partial(_packed, seed, name, rows, width, bits, kind)
            else:
                blocks = partial(_scales, seed, name, own[0] * own[1], deviation, 1 << bits, kind, part, f.tag)
            yield Tensor(f"{module}.{part}", tag, own, blocks)

    def _router(self, name: str, rows: int, width: int) -> weights.Floats:
        layer = int(name.split("layers.")[1].split(".")[0])
        return weights.router(weights.generator(self.seed, name), rows, width, self.top_k, layer, self.layers)

    def _unquantized(self, name: str, rows: int, width: int, deviation: float, kind: str) -> Blocks:
        rng, tag = weights.generator(self.seed, name), self.format.tag
        if kind == "router":
            return iter([weights.as_tag(self._router(name, rows, width), tag)])
        if kind == "embedding":
            return weights.embedding(rng, rows, width, tag)
        if kind == "output":
            return weights.output_layer(rng, rows, width, tag)
        return weights.plain(rng, rows, width, deviation, tag)

    def _quantized_router(self, name: str, rows: int, width: int, part: str) -> Blocks:
        """A router's weights in 8 bits."""
        groups = self._router(name, rows, width).reshape(rows, -1, self.format.group_size)
        low, high = groups.min(-1), groups.max(-1)
        scale = _floats((high - low) / 255)
        if part == "weight":
            yield np.rint((groups - low[..., None]) / scale[..., None]).clip(0, 255).astype(np.uint8).reshape(-1)
        else:
            yield weights.as_tag(scale if part == "scales" else low, self.format.tag)

    def _deviation(self, module: str, width: int) -> tuple[float, str]:
        if module.endswith("embed_tokens"):
            return 1.0, "embedding"
        if module.endswith("lm_head"):
            return width**-0.5, "output"
        gain = 1.0
        if module.endswith(("out_proj", "o_proj", "down_proj")):
            gain = weights.write_gain(module, self.layers, self.top_k)
        return gain * width**-0.5, "plain"

    def _small(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Norms, convolutions, and the constants of the delta rule."""
        seed, tag = self.seed, self.format.tag

        def values() -> weights.Floats:
            rng = weights.generator(seed, name)
            n = int(np.prod(shape))
            if name.endswith("A_log"):
                return _floats(np.log(0.5 + 15.5 * rng.random(n, np.float32)))
            if name.endswith("dt_bias"):  # steps between 0.001 and 0.1, so that heads forget at different speeds
                step = np.exp(rng.random(n, np.float32) * np.log(100) + np.log(0.001))
                return _floats(np.log(np.expm1(step)))
            if name.endswith("conv1d.weight"):
                return weights.uniform(rng, n, 0.5)
            return weights.uniform(rng, n, 0.05) + np.float32(1)

        tag = "F32" if name.endswith("A_log") else tag
        return Tensor(name, tag, shape, lambda: iter([weights.as_tag(values(), tag)]))


class _Experts:
    """Routed experts' bytes: slices of pools of random numbers, at places that follow from layer and expert.

    Making 18 GB of fresh random numbers would take longer than writing them. Slices overlap, but no two experts of a
    model are likely to be equal: a pool has hundreds of thousands of places to start.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, int, int]], f: Format, seed: int, gain: float) -> None:
        self._shapes, self._format, self._seed, self._gain = shapes, f, seed, gain
        self._pools: list[NDArray[np.uint8]] = []

    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Section name to (dtype tag, one expert's shape)."""
        f = self._format
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, (_, out, width) in self._shapes.items():
            if f.bits is None:
                found[f"{name}.weight"] = (f.tag, (out, width))
                continue
            if width % f.group_size:
                raise OptionError(f"{name}: a width of {width} cannot be quantized in groups of {f.group_size}")
            found[f"{name}.weight"] = ("U32", (out, width * f.bits // 32))
            found[f"{name}.scales"] = found[f"{name}.biases"] = (f.tag, (out, width // f.group_size))
        return found

    def each(self, layer: int, count: int) -> Iterator[list[NDArray[np.uint8]]]:
        """For each expert its sections' bytes, in the order of a blob."""
        table = make_table(layer, count, self.parts())
        if not self._pools:
            self._pools = self._make(table)
        rng = weights.generator(self._seed, "experts of layer", layer)
        for _ in range(count):
            rows: list[NDArray[np.uint8]] = []
            at = 0
            for section, pool in zip(table.sections, self._pools, strict=True):
                if not section.name.endswith(".biases"):  # a bias belongs to the scale at the same place
                    at = int(rng.integers(0, (pool.size - section.size) // _SLICE + 1)) * _SLICE
                rows.append(pool[at : at + section.size])
            yield rows

    def blobs(self, layer: int, table: LayerTable) -> Blocks:
        """A layer file, piece by piece."""
        padding = np.zeros(table.stride - table.payload_bytes, np.uint8)
        for rows in self.each(layer, table.expert_count):
            yield from rows
            if padding.size:
                yield padding

    def _make(self, table: LayerTable) -> list[NDArray[np.uint8]]:
        """A pool for each section. Packed integers are alike everywhere, so all projections share one pool."""
        f, pools = self._format, []
        packed: NDArray[np.uint8] | None = None
        largest = max(s.size for s in table.sections)
        for section in table.sections:
            projection, part = section.name.split(".")
            width = self._shapes[projection][2]
            deviation = (self._gain if projection == "down_proj" else 1.0) * width**-0.5
            rng = weights.generator(self._seed, "pool", projection, "" if part == "weight" else "scales")
            if part == "weight" and f.bits is None:
                item = tensor_bytes(f.tag, (1,))
                values = weights.uniform(rng, (section.size + _POOL_BYTES // 3) // item, deviation)
                pools.append(weights.as_tag(values, f.tag))
            elif part == "weight":
                if packed is None:
                    packed = rng.integers(0, 256, largest + _POOL_BYTES, np.uint8)
                pools.append(packed)
            else:
                n = (section.size + (1 << 20)) // tensor_bytes(f.tag, (1,))
                pair = weights.scales(rng, n, deviation, f.levels)
                pools.append(weights.as_tag(pair[part == "biases"], f.tag))
        return pools


def _packed(seed: int, name: str, rows: int, width: int, bits: int, kind: str) -> Blocks:
    return weights.quantized(weights.generator(seed, name), rows, width, bits, kind)


def _scales(seed: int, name: str, n: int, deviation: float, levels: int, kind: str, part: str, tag: str) -> Blocks:
    """Scales or biases of `n` groups; both come from the same numbers."""
    rng = weights.generator(seed, name, "scales")
    for at in range(0, n, weights.BLOCK):
        pair = weights.scales(rng, min(weights.BLOCK, n - at), deviation, levels, kind)
        yield weights.as_tag(pair[part == "biases"], tag)


def _floats(values: NDArray[np.floating[Any]]) -> weights.Floats:
    return values.astype(np.float32)
