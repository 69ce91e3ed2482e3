"""The .qpack container: its dataclasses, and the checks that stand between a stranger's folder and us.

Knows names, numbers and JSON; reads no tensor and keeps no file open. Invariant: a `Container` that exists was
consistent when it was opened: every file is there with its size, every section lies inside its blob without touching
another, every size follows from a dtype and a shape, and the counts agree with config.json.
The format is specified in repack/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .config import ModelConfig
from .errors import (
    BadStride,
    ConfigMismatch,
    ContainerError,
    MissingPart,
    NotAContainer,
    SectionOutside,
    SectionOverlap,
    SectionSize,
    UnknownVersion,
    UnsafePath,
    WrongSize,
)
from .safetensors import DTYPE_BYTES, MAX_RANK, tensor_bytes

MAGIC = "QPACK"
PAGE = 16_384  # the page size of Apple silicon; blobs start on one
MANIFEST, LAYOUT, HASHES, CONFIG, DENSE = (
    "manifest.json", "packed_experts/layout.json", "hashes.json", "config.json", "model.safetensors",
)  # fmt: skip

# Order of the sections inside a blob. Version 1 knows the first nine of `gate up down` x `weight scales biases`.
V1_SECTIONS = tuple(f"{p}_proj.{part}" for p in ("gate", "up", "down") for part in ("weight", "scales", "biases"))
SECTION_ORDER = tuple(
    f"{p}.{part}"
    for p in ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
    for part in ("weight", "scales", "biases", "global_scale", "bias")
)

# Bounds for numbers from disk: far above any model, far below what would exhaust memory.
MAX_JSON_BYTES, MAX_LAYERS, MAX_EXPERTS, MAX_STRIDE, MAX_FILES = 16_000_000, 4096, 65_536, 1 << 34, 100_000


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
        return self.expert_count * self.stride

    @property
    def file_name(self) -> str:
        return layer_file(self.layer)


@dataclass(frozen=True, slots=True)
class Container:
    """An opened and checked container. `layers` has an entry for each layer with routed experts."""

    path: Path
    version: int
    model_name: str
    source: str
    quant_bits: int | None
    quant_group_size: int | None
    files: Mapping[str, int]
    layer_count: int
    linear_layers: tuple[bool, ...]
    layers: Mapping[int, LayerTable]

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts, padding not counted."""
        return sum(t.expert_count * t.payload_bytes for t in self.layers.values())


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
    """The text of layout.json, in the lowest version that can say it."""
    if version_for(layers, layer_count) == 1:
        body: dict[str, Any] = _table_json(layers[0])
    else:
        body = {
            "version": 2,
            "layers": [_table_json(layers[n]) if n in layers else None for n in range(layer_count)],
        }
    return to_json({"layerCount": layer_count, "linearLayers": list(linear_layers), **body})


def to_json(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def is_container(path: Path) -> bool:
    """Whether a folder claims to be a container (its claims are not checked)."""
    return (path / MANIFEST).is_file()


def open_container(path: Path) -> Container:
    """Read manifest, layout and config of a container and check them against each other and the files on disk.

    Raises:
        ContainerError: one subclass for each way a container can lie; the message says what to do.
    """
    manifest = read_json(path / MANIFEST, missing=NotAContainer)
    if manifest.get("magic") != MAGIC:
        raise NotAContainer(f"{path}: manifest.json has magic {manifest.get('magic')!r}, {MAGIC!r} was expected")
    version = manifest.get("version")
    if version not in (1, 2) or type(version) is not int:
        raise UnknownVersion(
            f"{path}: container version {version!r}; this program reads 1 and 2. "
            "Upgrade with `pip install -U swiftlet-mlx`, or repack the model"
        )
    files = _files(manifest.get("files"), path)
    layout = read_json(path / LAYOUT, missing=MissingPart)
    if layout.get("version", 1) != version:
        raise UnknownVersion(f"{path}: manifest version {version} but layout version {layout.get('version', 1)}")
    layers, layer_count, linear = parse_layout(layout, str(path))
    container = Container(
        path=path,
        version=version,
        model_name=str(manifest.get("modelName", "")),
        source=str(manifest.get("sourceCheckpoint", "")),
        quant_bits=_optional_int(manifest.get("quantBits")),
        quant_group_size=_optional_int(manifest.get("quantGroupSize")),
        files=files,
        layer_count=layer_count,
        linear_layers=linear,
        layers=layers,
    )
    _check_sizes(container)
    _check_config(container, read_json(path / CONFIG, missing=MissingPart))
    return container


def parse_layout(layout: Mapping[str, Any], where: str) -> tuple[dict[int, LayerTable], int, tuple[bool, ...]]:
    """Tables, layer count and linear-layer flags of a layout.json of either version."""
    layer_count = _int(layout.get("layerCount"), 1, MAX_LAYERS, f"{where}: layerCount")
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
        raise type(error)(f"{where}: {LAYOUT}: {error}") from None
    if not tables:
        raise ContainerError(f"{where}: no layer has routed experts")
    return tables, layer_count, flags


def safe_relative(name: Any, where: str) -> str:
    """Return `name` if it is a relative path that stays inside its folder.

    Raises:
        UnsafePath: for absolute paths, `..`, backslashes, control characters, empty components.
    """
    ok = isinstance(name, str) and 0 < len(name) <= 1024 and "\\" not in name and name.isprintable()
    if ok:
        parts = name.split("/")
        ok = not PurePosixPath(name).is_absolute() and all(p not in ("", ".", "..") for p in parts)
        ok = ok and ":" not in parts[0]
    if not ok:
        raise UnsafePath(f"{where}: the path {name!r} does not stay inside the folder; do not use this container")
    return str(name)


def read_json(path: Path, missing: type[ContainerError]) -> dict[str, Any]:
    """A JSON object from a file of bounded size, or the error that says which part is missing or damaged."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ContainerError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise missing(f"{path}: not found; {_HOW_TO_MEND}") from None
    except OSError as error:
        raise ContainerError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"{path}: not valid JSON ({error}); {_HOW_TO_MEND}") from None
    if not isinstance(value, dict):
        raise ContainerError(f"{path}: an object was expected, found {type(value).__name__}")
    return value


_HOW_TO_MEND = (
    "it looks like an interrupted copy. Copy the container again, or make it anew with "
    "`swiftlet-mlx repack --source FOLDER --output NAME.qpack`"
)


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
        _int(entry.get("expertCount"), 1, MAX_EXPERTS, f"layer {layer}: expertCount"),
        _int(entry.get("expertStride"), 0, MAX_STRIDE, f"layer {layer}: expertStride"),
        tuple(_parse_section(layer, s) for s in entry["sections"]),
    )


def _parse_section(layer: int, s: Any) -> Section:
    where = f"layer {layer}: a section"
    if not isinstance(s, dict) or not isinstance(s.get("shape"), list) or len(s["shape"]) > MAX_RANK:
        raise ContainerError(f"{where} is not an object with a shape")
    return Section(
        str(s.get("name")),
        str(s.get("dtype")),
        tuple(_int(n, 0, MAX_STRIDE, f"{where}'s shape") for n in s["shape"]),
        _int(s.get("offset"), 0, 1 << 62, f"{where}'s offset"),
        _int(s.get("size"), 0, 1 << 62, f"{where}'s size"),
    )


def _int(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ContainerError(f"{what} is {value!r}, a whole number from {low} to {high} was expected")
    return value


def _optional_int(value: Any) -> int | None:
    return value if type(value) is int else None


def _files(files: Any, path: Path) -> dict[str, int]:
    if not isinstance(files, dict) or not files or len(files) > MAX_FILES:
        raise ContainerError(f"{path}: manifest.json has no usable list of files")
    where = f"{path}: manifest.json"
    return {safe_relative(k, where): _int(v, 0, 1 << 50, f"{where}: size of {k!r}") for k, v in files.items()}


def _check_sizes(container: Container) -> None:
    """Every file the manifest or the layout names is there, with its size; all faults in one message."""
    expected: dict[str, int | None] = {DENSE: None, **container.files}
    for table in container.layers.values():
        listed = container.files.get(table.file_name, table.file_bytes)
        if listed != table.file_bytes:
            raise WrongSize(
                f"{container.path}: {table.file_name} is {listed} bytes in the manifest, "
                f"{table.expert_count} experts of {table.stride} bytes are {table.file_bytes}"
            )
        expected[table.file_name] = table.file_bytes
    missing: list[str] = []
    wrong: list[str] = []
    for name, size in expected.items():
        try:
            found = (container.path / name).stat().st_size
        except OSError:
            missing.append(name)
            continue
        if size is not None and found != size:
            wrong.append(f"{name} has {found} bytes of {size}")
    if missing or wrong:
        faults = [f"missing {name}" for name in missing] + wrong
        shown = "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")
        kind = MissingPart if missing else WrongSize
        good = len(expected) - len(faults)
        raise kind(f"{container.path}: {good} of {len(expected)} parts are whole: {shown}; {_HOW_TO_MEND}")


def _check_config(container: Container, config: Mapping[str, Any]) -> None:
    shape = ModelConfig.from_dict(config, str(container.path / CONFIG))
    if shape.layer_count != container.layer_count:
        raise ConfigMismatch(
            f"{container.path}: config.json has {shape.layer_count} layers, layout.json {container.layer_count}"
        )
    for table in container.layers.values():
        if shape.expert_count and table.expert_count != shape.expert_count:
            raise ConfigMismatch(
                f"{container.path}: config.json has {shape.expert_count} experts, layout.json "
                f"{table.expert_count} in layer {table.layer}"
            )
