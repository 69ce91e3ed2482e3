"""What a container made from a checkpoint will consist of: every file, every tensor's place, every small file's text.

Knows headers, tables and JSON; reads no tensor and writes nothing. The local repacker copies by it, the installer
downloads by it, so both give the same container. Invariant: the plan follows from the checkpoint alone; each byte of
each tensor that is kept goes to exactly one place, unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlet_mlx.checkpoint import Checkpoint, Located
from swiftlet_mlx.errors import RepackError
from swiftlet_mlx.jsonfile import to_json
from swiftlet_mlx.layout import LayerTable, layout_json, v1_width, version_for
from swiftlet_mlx.qpack import CONFIG, DENSE, LAYOUT, MAGIC
from swiftlet_mlx.safetensors import build_header

from .places import Segment

MTP = "mtp.safetensors"
SHIM = "swiftlet_mlx_model.py"
SHIM_TEXT = """\
from pathlib import Path
from swiftlet_mlx import model_classes
Model, ModelArgs = model_classes(Path(__file__).parent)
"""
# What makes a model folder complete beside its tensors. Python files are never copied.
SMALL_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE",
)  # fmt: skip
_MAX_SMALL_BYTES = 256_000_000


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file of the container: its header, and its tensors in file order with their offsets."""

    name: str
    header: bytes
    tensors: tuple[tuple[str, Located, int], ...]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A container to be.

    Attributes:
        checkpoint: What it is made from.
        tensor_files: `model.safetensors`, and `mtp.safetensors` where there are such tensors.
        copied: Small files copied as they are.
        written: Small files whose text is made here, without the manifest.
        left_out: What of the checkpoint is not kept, in words.
        remarks: What the user should know.
    """

    checkpoint: Checkpoint
    tensor_files: tuple[TensorFile, ...]
    copied: tuple[str, ...]
    written: Mapping[str, bytes]
    left_out: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def tables(self) -> Mapping[int, LayerTable]:
        return self.checkpoint.tables

    @property
    def large_sizes(self) -> dict[str, int]:
        """Final sizes of layer files and tensor files."""
        layers = {t.file_name: t.file_bytes for t in self.tables.values()}
        return {**{f.name: f.file_bytes for f in self.tensor_files}, **layers}

    def segments(self, shard: str, shard_bytes: int, spare: str) -> list[Segment]:
        """Where each byte of one source file goes, from its first to its last.

        Args:
            shard: Name of the source file.
            shard_bytes: Its size.
            spare: Target for bytes that are not part of the container (the header, tensors left out); they lie there
                at the offsets they have in the source.
        """
        placed: list[Segment] = []
        for file in self.tensor_files:
            for _, at, offset in file.tensors:
                if at.file == shard:
                    placed.append(Segment(at.info.start, at.info.nbytes, file.name, offset))
        for layer, table in self.tables.items():
            for section in table.sections:
                at = self.checkpoint.experts[layer][section.name]
                if at.file == shard:
                    placed.append(
                        Segment(
                            at.info.start,
                            section.size,
                            table.file_name,
                            section.offset,
                            table.expert_count,
                            table.stride,
                        )
                    )
        segments: list[Segment] = []
        end = 0
        for segment in sorted(placed, key=lambda s: (s.start, s.stop)):
            if segment.start > end:
                segments.append(Segment(end, segment.start - end, spare, end))
            segments.append(segment)
            end = segment.stop
        if end < shard_bytes:
            segments.append(Segment(end, shard_bytes - end, spare, end))
        return segments

    def manifest(self, source: str, sizes: Mapping[str, int]) -> bytes:
        """The text of manifest.json.

        Args:
            source: What to call the checkpoint.
            sizes: Sizes of all files, manifest and hashes excepted.
        """
        version = version_for(self.tables, self.checkpoint.shape.layer_count)
        bits, group_size = _default_width(self.checkpoint.config)
        width = v1_width(self.tables[0]) if version == 1 else None
        if width is not None and width != (0, 0):
            bits, group_size = width  # a version 1 reader takes the experts' width from here, whatever the default
        return to_json(
            {
                "magic": MAGIC,
                "version": version,
                "modelName": self.checkpoint.shape.model_type,
                "sourceCheckpoint": source,
                "quantBits": bits,
                "quantGroupSize": group_size,
                "files": dict(sorted(sizes.items())),
            }
        )


def make_plan(checkpoint: Checkpoint, exists: Callable[[str], bool] | None = None) -> Plan:
    """Plan a container.

    Args:
        checkpoint: An opened checkpoint.
        exists: Tells whether a small file is at the source; None looks into the checkpoint's folder.

    Raises:
        RepackError: if a small file of the source cannot be used.
    """
    there = exists or (lambda name: (checkpoint.folder / name).is_file())
    copied = tuple(name for name in SMALL_FILES if there(name))
    files = [_tensor_file(DENSE, checkpoint.dense)]
    left_out, remarks = [], list(checkpoint.warnings)
    if checkpoint.mtp:
        files.append(_tensor_file(MTP, checkpoint.mtp))
        remarks.append(
            f"{len(checkpoint.mtp)} tensors for multi-token prediction are kept apart in {MTP}; nothing uses them"
        )
    if checkpoint.vision:
        nbytes = sum(at.info.nbytes for at in checkpoint.vision.values())
        left_out.append(f"{len(checkpoint.vision)} vision tensors ({nbytes / 1e9:.2f} GB): images are not supported")
    if checkpoint.config.get("model_file"):
        remarks.append(
            f"config.json names {checkpoint.config['model_file']!r}: code from a model folder is neither run nor copied"
        )
    if "tokenizer.json" not in copied and "tokenizer.model" not in copied:
        remarks.append("the source has no tokenizer: only token ids will go in and out")
    elif not _has_template(checkpoint.folder, copied):
        remarks.append("the source has no chat template: `chat` will not work, `generate` will")
    return Plan(
        checkpoint=checkpoint,
        tensor_files=tuple(files),
        copied=copied,
        written={
            CONFIG: config_text(checkpoint.config),
            LAYOUT: layout_json(checkpoint.tables, checkpoint.shape.layer_count, checkpoint.shape.linear_layers),
            SHIM: SHIM_TEXT.encode(),
        },
        left_out=tuple(left_out),
        remarks=tuple(remarks),
    )


def config_text(config: Mapping[str, Any]) -> bytes:
    """The container's config.json: the source's, with the model file through which unmodified mlx-lm streams it."""
    return json.dumps({**config, "model_file": SHIM}, indent=4).encode() + b"\n"


def _default_width(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The config's default bits and group size, None where it gives none."""
    settings = config.get("quantization") or config.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    bits, group_size = (settings.get(key) for key in ("bits", "group_size"))
    return (bits if type(bits) is int else None), (group_size if type(group_size) is int else None)


def small_text(folder: Path, name: str) -> bytes:
    """The bytes of a small file, or the error that says which one cannot be used."""
    path = folder / name
    try:
        if path.stat().st_size > _MAX_SMALL_BYTES:
            raise RepackError(f"{path}: {path.stat().st_size} bytes are too many for this file")
        return path.read_bytes()
    except OSError as error:
        raise RepackError(f"{path}: cannot be read ({error.strerror})") from None


def _tensor_file(name: str, tensors: Mapping[str, Located]) -> TensorFile:
    ordered = sorted(tensors.items())
    header = build_header([(n, at.info.dtype, at.info.shape) for n, at in ordered], {"format": "mlx"})
    offset, placed = len(header), []
    for n, at in ordered:
        placed.append((n, at, offset))
        offset += at.info.nbytes
    return TensorFile(name, header, tuple(placed), offset)


def _has_template(folder: Path, copied: tuple[str, ...]) -> bool:
    if "chat_template.jinja" in copied or "chat_template.json" in copied:
        return True
    try:
        return bool(json.loads(small_text(folder, "tokenizer_config.json")).get("chat_template"))
    except (RepackError, ValueError, AttributeError):
        return False
