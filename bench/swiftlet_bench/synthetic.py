"""Models of random weights in real shapes, written at disk speed: try memory and I/O without the download.

Writes a container or an MLX checkpoint folder, with the same bytes for the same seed; `sourceCheckpoint` and config
say "synthetic". Knows files; the tensors are those of tensors.py. Invariants: memory stays below about 300 MB whatever
the size; the output appears only when whole; the same arguments give the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from swiftlet_repack.plan import SHIM, SHIM_TEXT, config_text

from swiftlet_mlx.errors import DiskFull, OutputExists
from swiftlet_mlx.jsonfile import to_json
from swiftlet_mlx.layout import layout_json
from swiftlet_mlx.qpack import CONFIG, DENSE, LAYOUT, MAGIC, MANIFEST
from swiftlet_mlx.safetensors import build_header

from .bytetokenizer import add_tokenizer
from .tensors import Blocks, Model, Tensor

SPACE_LEFT = 2 * 10**9  # bytes that stay free on the disk

Progress = Callable[[int, int, str], None]


def make_container(
    folder: Path,
    config: Mapping[str, Any],
    *,
    bits: int | None = 4,
    group_size: int = 64,
    dtype: mx.Dtype = mx.bfloat16,
    seed: int = 0,
    tokenizer: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Path:
    """Write a container of random weights.

    Args:
        folder: NAME.qpack, which must not exist.
        config: A model's config; every layer must have experts.
        bits: 4 or 8, of all large weights; None leaves everything unquantized.
        group_size: Of the quantization.
        dtype: Of everything that is not quantized: bfloat16, float16 or float32.
        seed: Of the weights.
        tokenizer: Add a byte-level tokenizer, so that commands that take text run.
        progress: Called with bytes done, bytes in all, and the file at work.

    Returns:
        The folder.

    Raises:
        OptionError: for settings that cannot be.
        OutputExists, DiskFull: before anything is written.
    """
    model = Model(config, bits, group_size, dtype, seed)
    header = build_header([(t.name, t.tag, t.shape) for t in model.dense], {"format": "mlx"})
    total = len(header) + sum(t.nbytes for t in model.dense) + sum(t.file_bytes for t in model.tables.values())
    with _output(folder, total) as part:
        (part / LAYOUT).parent.mkdir()
        out = _Out(total, progress)
        out.write(part / DENSE, chain([_bytes(header)], _all(model.dense)))
        for layer, table in model.tables.items():
            out.write(part / table.file_name, model.experts.blobs(layer, table))
        (part / LAYOUT).write_bytes(layout_json(model.tables, len(model.tables), model.linear))
        (part / SHIM).write_text(SHIM_TEXT)
        (part / CONFIG).write_bytes(config_text(model.config))
        if tokenizer:
            add_tokenizer(part, model.vocab)
        sizes = {p.relative_to(part).as_posix(): p.stat().st_size for p in sorted(part.rglob("*")) if p.is_file()}
        manifest = {
            "magic": MAGIC,
            "version": 1,
            "modelName": model.config["model_type"],
            "sourceCheckpoint": model.origin,
            "quantBits": bits,
            "quantGroupSize": group_size if bits else None,
            "files": sizes,
        }
        (part / MANIFEST).write_bytes(to_json(manifest))
    return folder


def make_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    bits: int | None = 4,
    group_size: int = 64,
    dtype: mx.Dtype = mx.bfloat16,
    seed: int = 0,
    tokenizer: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Path:
    """Write the same model as an MLX checkpoint folder, one file a layer, for stock mlx-lm. See `make_container`."""
    model = Model(config, bits, group_size, dtype, seed)
    files = [model.dense, *(model.stacked(layer) for layer in model.tables)]
    total = sum(t.nbytes for tensors in files for t in tensors)
    with _output(folder, total) as part:
        out, weight_map = _Out(total, progress), {}
        for n, tensors in enumerate(files):
            name = f"model-{n + 1:05d}-of-{len(files):05d}.safetensors"
            header = build_header([(t.name, t.tag, t.shape) for t in tensors], {"format": "mlx"})
            out.write(part / name, chain([_bytes(header)], _all(tensors)))
            weight_map.update({t.name: name for t in tensors})
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (part / CONFIG).write_text(json.dumps(model.config, indent=4))
        if tokenizer:
            add_tokenizer(part, model.vocab)
    return folder


def is_synthetic(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are random."""
    return "synthetic" in config


class _Out:
    """Writes files block by block and reports."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def write(self, path: Path, blocks: Iterable[NDArray[np.uint8]]) -> None:
        with open(path, "wb", buffering=1 << 20) as file:
            for block in blocks:
                file.write(block.data)
                self._done += block.size
                self._progress(self._done, self._total, path.name)


class _output:
    """The folder a model is written into; it gets its name when everything is there."""

    def __init__(self, folder: Path, needed: int) -> None:
        self._folder, self._part = folder, folder.with_name(folder.name + ".partial")
        if folder.exists():
            raise OutputExists(f"{folder} exists; choose another --output or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if needed + SPACE_LEFT > free:
            raise DiskFull(
                f"{folder.parent}: {needed / 1e9:.1f} GB would be written and {SPACE_LEFT / 1e9:.0f} GB stay free, but "
                f"{free / 1e9:.1f} GB are there. Ask for fewer --layers, or choose another --output"
            )

    def __enter__(self) -> Path:
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir()
        return self._part

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            os.replace(self._part, self._folder)
        else:
            shutil.rmtree(self._part, ignore_errors=True)


def _all(tensors: Iterable[Tensor]) -> Blocks:
    for tensor in tensors:
        yield from tensor.blocks()


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)
