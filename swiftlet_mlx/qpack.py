"""The .qpack container: its files, and the checks that stand between a stranger's folder and us.

Knows names, numbers and JSON; reads no tensor and keeps no file open. Invariant: a `Container` that exists was
consistent when it was opened: every file is there with its size, every layer has a table that holds (layout.py), and
the counts agree with config.json. The format is specified in repack/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .config import ModelConfig
from .errors import (
    ConfigMismatch,
    ContainerError,
    MissingPart,
    NotAContainer,
    UnknownVersion,
    UnsafePath,
    WrongSize,
)
from .jsonfile import read_object
from .layout import LayerTable, bounded, parse_layout

MAGIC = "QPACK"
MANIFEST, LAYOUT, HASHES, CONFIG, DENSE = (
    "manifest.json", "packed_experts/layout.json", "hashes.json", "config.json", "model.safetensors",
)  # fmt: skip
MAX_FILES = 100_000  # far above any model
_HOW_TO_MEND = (
    "it looks like an interrupted copy. Copy the container again, or make it anew with "
    "`swiftlet-mlx repack --source FOLDER --output NAME.qpack`"
)


@dataclass(frozen=True, slots=True)
class Container:
    """An opened and checked container. `layers` has an entry for each layer with routed experts."""

    path: Path
    version: int
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
    """One of a container's JSON files.

    Args:
        path: The file.
        missing: What to raise if it is not there.

    Raises:
        ContainerError: it cannot be used.
    """
    return read_object(path, ContainerError, missing=missing, advice=_HOW_TO_MEND)


def _optional_int(value: Any) -> int | None:
    return value if type(value) is int else None


def _files(files: Any, path: Path) -> dict[str, int]:
    if not isinstance(files, dict) or not files or len(files) > MAX_FILES:
        raise ContainerError(f"{path}: manifest.json has no usable list of files")
    where = f"{path}: manifest.json"
    return {safe_relative(k, where): bounded(v, 0, 1 << 50, f"{where}: size of {k!r}") for k, v in files.items()}


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
