"""What layout.json says: where the parts of each expert lie in its layer's file, in either version.

Knows names, numbers and JSON; no files. Invariant: in a `LayerTable` that exists every section lies inside its blob
without touching another, and every size follows from a dtype and a shape. The format is specified in repack/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import BadStride, ContainerError, SectionOutside, SectionOverlap, SectionSize
from .jsonfile import to_json
from .safetensors import DTYPE_BYTES, MAX_RANK, tensor_bytes

PAGE = 16_384  # the page size of Apple silicon; blobs start on one

# Order of the sections inside a blob. Version 1 knows the first nine of `gate up down` x `weight scales biases`.
V1_SECTIONS = tuple(f"{p}_proj.{part}" for p in ("gate", "up", "down") for part in ("weight", "scales", "biases"))
SECTION_ORDER = tuple(
    f"{p}.{part}"
    for p in ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
    for part in ("weight", "scales", "biases", "global_scale", "bias")
)

# Bounds for numbers from disk: far above any model, far below what would exhaust memory.
MAX_LAYERS, MAX_EXPERTS, MAX_STRIDE = 4096, 65_536, 1 << 34


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of one expert inside its blob. `shape` is one expert's; `offset` counts from the blob's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def __post_init__(self) -> None:
        if self.name not in SECTION_ORDER:
            raise ContainerError(f"unknown section {self.name!r}; known are {', '.join(SECTION_ORDER)}")
        if self.dtype not in DTYPE_BYTES or len(self.shape) > MAX_RANK or any(n < 0 for n in self.shape):
            raise SectionSize(f"section {self.name}: impossible dtype {self.dtype!r} or shape {list(self.shape)}")
        need = tensor_bytes(self.dtype, self.shape)
        if self.size != need or need == 0:
            raise SectionSize(
                f"section {self.name}: {self.dtype} {list(self.shape)} is {need} bytes, the layout says {self.size}"
            )


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Where one layer's experts lie: blob `e` of `stride` bytes starts at `e * stride`."""

    layer: int
    expert_count: int
    stride: int
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.expert_count <= MAX_EXPERTS:
            raise ContainerError(f"layer {self.layer}: impossible expert count {self.expert_count}")
        if not self.sections:
            raise ContainerError(f"layer {self.layer}: no sections")
        if self.stride % PAGE or not 0 < self.stride <= MAX_STRIDE:
            raise BadStride(f"layer {self.layer}: expert stride {self.stride} is not a multiple of {PAGE}")
        names = [s.name for s in self.sections]
        if len(set(names)) != len(names):
            raise ContainerError(f"layer {self.layer}: a section name appears twice in {names}")
        at, before = 0, "the blob's start"
        for s in sorted(self.sections, key=lambda s: s.offset):
            if s.offset < 0 or s.offset + s.size > self.stride:
                if self.payload_bytes > self.stride:
                    raise BadStride(
                        f"layer {self.layer}: sections need {self.payload_bytes} bytes, the stride is {self.stride}"
                    )
                raise SectionOutside(
                    f"layer {self.layer}: section {s.name} ends at {s.offset + s.size}, the blob at {self.stride}"
                )
            if s.offset < at:
                raise SectionOverlap(f"layer {self.layer}: section {s.name} at {s.offset} overlaps {before}")
            at, before = s.offset + s.size, s.name

    @property
    def payload_bytes(self) -> int:
        """Bytes of one expert without the padding; what a slot costs."""
        return sum(s.size for s in self.sections)

    @property
    def file_bytes(self) -> int:
        """Bytes of the layer's file."""
        return self.expert_count * self.stride

    @property
    def file_name(self) -> str:
        """Of the layer's file, relative to the container."""
        return layer_file(self.layer)


def layer_file(layer: int) -> str:
    """Relative path of a layer's blobs."""
    return f"packed_experts/layer_{layer:02d}.bin"


def make_table(layer: int, expert_count: int, parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> LayerTable:
    """Lay one layer's tensors out as Swiftlet does: fixed order, no gaps, stride rounded up to a page.

    Args:
        layer: Index of the layer in the model.
        expert_count: Number of routed experts.
        parts: Section name to (dtype tag, shape of one expert's tensor).
    """
    sections, at = [], 0
    for name in sorted(parts, key=SECTION_ORDER.index):
        dtype, shape = parts[name]
        size = tensor_bytes(dtype, shape)
        sections.append(Section(name, dtype, shape, at, size))
        at += size
    return LayerTable(layer, expert_count, -(-at // PAGE) * PAGE, tuple(sections))


def version_for(layers: Mapping[int, LayerTable], layer_count: int) -> int:
    """1 where version 1 can say it, else 2: layers that differ, layers without experts, other sections or widths."""
    tables = list(layers.values())
    alike = all(_key(t) == _key(tables[0]) for t in tables)
    every = sorted(layers) == list(range(layer_count))
    return 1 if alike and every and v1_width(tables[0]) is not None else 2


def v1_width(table: LayerTable) -> tuple[int, int] | None:
    """Bits and group size of a layer's experts, which version 1 gives once for all, in the manifest.

    They follow from shapes: `down_proj` takes in what `gate_proj` puts out, and the other way round.

    Returns:
        `(0, 0)` for experts that are not quantized; None where version 1 cannot say it: projections that differ,
        quantization without biases, other sections.
    """
    parts = {s.name: s for s in table.sections}
    if not parts.keys() <= set(V1_SECTIONS):
        return None
    widths = set()
    for name, opposite in (("gate_proj", "down_proj"), ("up_proj", "down_proj"), ("down_proj", "gate_proj")):
        weight, scales, biases = (parts.get(f"{name}.{part}") for part in ("weight", "scales", "biases"))
        other = parts.get(f"{opposite}.weight")
        if weight is None or other is None or (scales is None) != (biases is None):
            return None
        if scales is None:
            widths.add((0, 0))
            continue
        if len(weight.shape) != 2 or len(scales.shape) != 2 or len(other.shape) != 2:
            return None
        inputs = other.shape[0]
        if weight.shape[1] * 32 % inputs or inputs % scales.shape[1]:
            return None
        widths.add((weight.shape[1] * 32 // inputs, inputs // scales.shape[1]))
    return widths.pop() if len(widths) == 1 else None


def layout_json(layers: Mapping[int, LayerTable], layer_count: int, linear_layers: tuple[bool, ...]) -> bytes:
    """The text of layout.json, in the lowest version that can say it.

    Args:
        layers: The table of each layer that has experts.
        layer_count: Layers of the model, with experts or without.
        linear_layers: For each of them, whether it is a DeltaNet.
    """
    if version_for(layers, layer_count) == 1:
        body: dict[str, Any] = _table_json(layers[0])
    else:
        body = {
            "version": 2,
            "layers": [_table_json(layers[n]) if n in layers else None for n in range(layer_count)],
        }
    return to_json({"layerCount": layer_count, "linearLayers": list(linear_layers), **body})


def parse_layout(layout: Mapping[str, Any], where: str) -> tuple[dict[int, LayerTable], int, tuple[bool, ...]]:
    """Tables, layer count and linear-layer flags of a layout.json of either version.

    Raises:
        ContainerError: the subclass says in which way it lies; `where` begins the message.
    """
    layer_count = bounded(layout.get("layerCount"), 1, MAX_LAYERS, f"{where}: layerCount")
    linear = layout.get("linearLayers", [])
    if not isinstance(linear, list) or len(linear) not in (0, layer_count):
        raise ContainerError(f"{where}: linearLayers has not one entry for each of {layer_count} layers")
    flags = tuple(bool(b) for b in linear) or (False,) * layer_count
    try:
        if layout.get("version", 1) == 1:
            entries: list[Any] = [layout] * layer_count
        else:
            entries = layout.get("layers", [])
            if not isinstance(entries, list) or len(entries) != layer_count:
                raise ContainerError("`layers` has not one entry for each layer")
        tables = {n: _parse_table(n, entry) for n, entry in enumerate(entries) if entry is not None}
    except ContainerError as error:
        raise type(error)(f"{where}: layout.json: {error}") from None
    if not tables:
        raise ContainerError(f"{where}: no layer has routed experts")
    return tables, layer_count, flags


def bounded(value: Any, low: int, high: int, what: str) -> int:
    """A number from a container's JSON, if it is one and within its bounds, ends included.

    Raises:
        ContainerError: it is not; `what` names it.
    """
    if type(value) is not int or not low <= value <= high:
        raise ContainerError(f"{what} is {value!r}, a whole number from {low} to {high} was expected")
    return value


def _key(t: LayerTable) -> tuple[int, int, tuple[Section, ...]]:
    return t.expert_count, t.stride, t.sections


def _table_json(t: LayerTable) -> dict[str, Any]:
    sections = [
        {"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "offset": s.offset, "size": s.size}
        for s in t.sections
    ]
    return {"expertCount": t.expert_count, "expertStride": t.stride, "sections": sections}


def _parse_table(layer: int, entry: Any) -> LayerTable:
    if not isinstance(entry, dict) or not isinstance(entry.get("sections"), list):
        raise ContainerError(f"layer {layer}: no section table")
    return LayerTable(
        layer,
        bounded(entry.get("expertCount"), 1, MAX_EXPERTS, f"layer {layer}: expertCount"),
        bounded(entry.get("expertStride"), 0, MAX_STRIDE, f"layer {layer}: expertStride"),
        tuple(_parse_section(layer, s) for s in entry["sections"]),
    )


def _parse_section(layer: int, s: Any) -> Section:
    where = f"layer {layer}: a section"
    if not isinstance(s, dict) or not isinstance(s.get("shape"), list) or len(s["shape"]) > MAX_RANK:
        raise ContainerError(f"{where} is not an object with a shape")
    return Section(
        str(s.get("name")),
        str(s.get("dtype")),
        tuple(bounded(n, 0, MAX_STRIDE, f"{where}'s shape") for n in s["shape"]),
        bounded(s.get("offset"), 0, 1 << 62, f"{where}'s offset"),
        bounded(s.get("size"), 0, 1 << 62, f"{where}'s size"),
    )
