"""An ordinary MLX checkpoint folder: which file holds which tensor, and where its routed experts lie.

Knows headers and config only; tensor bytes are not read here and mlx is not imported. Invariant: a `Checkpoint` that
exists has each tensor exactly once, in a file that is there and whole, and is in MLX layout (stacked experts,
converted norms and convolutions): a raw Hugging Face export is refused before anything is written or loaded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ModelConfig, quantization_overrides, read_config
from .errors import CheckpointError, ConfigError, RawCheckpoint, StreamingUnsupported
from .jsonfile import object_if_there
from .layout import MAX_EXPERTS, LayerTable, make_table
from .qpack import is_container, safe_relative
from .safetensors import Header, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
_EXPERT = re.compile(
    r"^(?P<module>(?:.*\.)?layers\.(?P<layer>\d+)\.(?:.*\.)?(?:switch_mlp|switch_glu|experts))"
    r"\.(?P<section>(?:gate_proj|up_proj|down_proj|fc1|fc2)\.(?:weight|scales|biases|bias|global_scale))$"
)
_PER_EXPERT = re.compile(r"\.experts\.\d+\.")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor and the file (relative to the folder) that holds it."""

    file: str
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened and checked checkpoint. `experts[layer][section name]` are the stacked tensors of routed experts."""

    folder: Path
    config: Mapping[str, Any]
    shape: ModelConfig
    files: tuple[str, ...]
    dense: Mapping[str, Located]
    experts: Mapping[int, Mapping[str, Located]]
    tables: Mapping[int, LayerTable]
    mtp: Mapping[str, Located]
    vision: Mapping[str, Located]
    warnings: tuple[str, ...]

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(t.expert_count * t.payload_bytes for t in self.tables.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open an MLX checkpoint folder: index, headers, config; refuse what cannot be streamed exactly.

    Raises:
        CheckpointError: a shard is missing, a tensor appears twice, the index does not fit.
        RawCheckpoint: the folder is a Hugging Face export that mlx_lm.convert has not seen.
        StreamingUnsupported: the model has no routed experts, or none that can be told apart.
        SafetensorsError, ConfigError: a file is damaged.
    """
    if is_container(folder):
        raise CheckpointError(
            f"{folder} is a .qpack container, not a checkpoint. It can be copied as it is, and checked with "
            f"`swiftlet-mlx verify {folder}`"
        )
    config = read_config(folder)
    files, promised, warnings = shard_files(folder)
    headers = {name: read_header(folder / name) for name in files}
    return checkpoint_from_headers(folder, config, headers, promised, warnings)


def checkpoint_from_headers(
    folder: Path,
    config: Mapping[str, Any],
    headers: Mapping[str, Header],
    promised: Mapping[str, str] | None,
    warnings: Iterable[str] = (),
) -> Checkpoint:
    """The same from headers already at hand (a remote source reads them by range).

    Args:
        folder: Where the files are, for messages and later reads.
        config: The parsed config.json.
        headers: File name to checked header, for each shard.
        promised: The index's map of tensor name to file name, or None without an index.
        warnings: Remarks to carry along.

    Raises:
        CheckpointError, RawCheckpoint, StreamingUnsupported, ConfigError: as `open_checkpoint`.
    """
    notes = list(warnings)
    tensors = _merge(folder, headers, promised, notes)
    shape = ModelConfig.from_dict(config, str(folder / "config.json"))
    refuse_raw(folder, tensors, config)
    dense: dict[str, Located] = {}
    mtp: dict[str, Located] = {}
    vision: dict[str, Located] = {}
    experts: dict[int, dict[str, Located]] = defaultdict(dict)
    for name, located in tensors.items():
        match = _EXPERT.match(name)
        if is_mtp(name) or (match and int(match["layer"]) >= shape.layer_count):
            mtp[name] = located
        elif is_vision(name):
            vision[name] = located
        elif match and _is_stacked(located.info, match["section"]):
            layer = int(match["layer"])
            if match["section"] in experts[layer]:
                raise CheckpointError(f"{folder}: layer {layer} has {match['section']} twice, the second in {name}")
            experts[layer][match["section"]] = located
        else:
            dense[name] = located
    if not experts:
        raise StreamingUnsupported(
            f"{folder}: {shape.model_type} has no routed experts to stream"
            + (f" although config.json speaks of {shape.expert_count}" if shape.expert_count else "")
            + f". Run it with mlx-lm: `mlx_lm.chat --model {folder}`"
        )
    tables = {n: _table(folder, n, parts, shape) for n, parts in sorted(experts.items())}
    _check_overrides(folder, config, tensors)
    return Checkpoint(folder, config, shape, tuple(headers), dense, dict(experts), tables, mtp, vision, tuple(notes))


def shard_files(folder: Path) -> tuple[list[str], dict[str, str] | None, list[str]]:
    """Which safetensors files make up the checkpoint.

    Returns:
        File names, the index's tensor-to-file map (None without an index), and warnings about ignored files.

    Raises:
        CheckpointError: if a file that the index or the numbering promises is missing.
    """
    present = sorted(p.name for p in folder.glob("model*.safetensors"))
    promised = _read_index(folder)
    if promised is not None:
        wanted = sorted(set(promised.values()))
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {INDEX} names {', '.join(missing[:4])}, which "
                f"{'is' if len(missing) == 1 else 'are'} not there ({len(wanted) - len(missing)} of {len(wanted)} "
                "shards found). Download the missing files again"
            )
        stray = [name for name in present if name not in wanted]
        return wanted, promised, [f"{folder}: {name} is not in {INDEX} and is ignored" for name in stray]
    if not present:
        raise CheckpointError(f"{folder}: no model*.safetensors here; is this a model folder?")
    numbered = [m for name in present if (m := _SHARD.search(name))]
    if numbered:
        totals = {int(m[2]) for m in numbered}
        have = {int(m[1]) for m in numbered}
        lacking = sorted(set(range(1, max(totals) + 1)) - have)
        if len(totals) > 1 or lacking:
            raise CheckpointError(
                f"{folder}: shards {', '.join(map(str, lacking[:6])) or 'of two sets'} of {max(totals)} "
                "are missing and there is no index. Download the checkpoint again"
            )
    return present, None, []


def is_mtp(name: str) -> bool:
    """Whether a tensor belongs to multi-token prediction, which mlx-lm does not run."""
    return name.startswith("mtp.") or ".mtp." in name


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to a vision tower, which is not run."""
    return name.startswith(("vision_tower.", "visual.", "model.visual.", "model.vision_tower."))


def refuse_raw(folder: Path, tensors: Mapping[str, Located], config: Mapping[str, Any]) -> None:
    """Refuse what mlx_lm.convert has not converted. The decision is made once, from all headers.

    The signs are per-expert tensors, fused `gate_up_proj` experts, an unconverted convolution (`[C, 1, K]`) and
    foreign quantizations. The presence of `mtp.*` tensors says nothing: converted checkpoints may carry them.

    Raises:
        RawCheckpoint: with the sign that was found and the command that converts.
    """
    names = [n for n in tensors if not is_mtp(n) and not is_vision(n)]
    fp8 = [n for n in names if n.endswith(("weight_scale_inv", "weight_scale")) or
           tensors[n].info.dtype.startswith("F8_")]  # fmt: skip
    foreign = [n for n in names if n.endswith((".qweight", ".qzeros", "_blocks", ".weight_packed"))]
    raw = [
        n
        for n in names
        if _PER_EXPERT.search(n)
        or n.endswith((".experts.gate_up_proj", ".experts.gate_up_proj.weight", ".experts.down_proj"))
        or (n.endswith("conv1d.weight") and len(tensors[n].info.shape) == 3 and tensors[n].info.shape[2] != 1)
    ]
    command = f"`mlx_lm.convert --hf-path {folder} --mlx-path {folder.name}-mlx -q`"
    if fp8:
        raise RawCheckpoint(
            f"{folder}: {fp8[0]} is {tensors[fp8[0]].info.dtype}: an FP8 export, whose scales would be lost by "
            f"copying. Convert it first: {command}"
        )
    if foreign or raw:
        raise RawCheckpoint(
            f"{folder}: {(foreign + raw)[0]} shows that this is a Hugging Face export, not an MLX checkpoint. "
            f"Convert it first: {command}"
        )


def quantized_width(weight: TensorInfo, scales: TensorInfo, group_size: int) -> int:
    """Bits an element, from shapes: `weight` packs 32-bit words, `scales` has one column for `group_size` elements."""
    return weight.shape[-1] * 32 // (scales.shape[-1] * group_size)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    table = object_if_there(path, CheckpointError, advice="download it again", limit=_MAX_INDEX_BYTES)
    if table is None:
        return None
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: not a weight index; download it again")
    entries = {name: safe_relative(file, str(path)) for name, file in weight_map.items()}
    if not entries:
        raise CheckpointError(f"{path}: the weight map is empty; download it again")
    return entries


def _merge(
    folder: Path, headers: Mapping[str, Header], promised: Mapping[str, str] | None, notes: list[str]
) -> dict[str, Located]:
    tensors: dict[str, Located] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name} is in both {tensors[name].file} and {file}; "
                    "remove the file that does not belong here"
                )
            tensors[name] = Located(file, info)
    if promised is not None:
        lost = [name for name in promised if name not in tensors]
        if lost:
            raise CheckpointError(
                f"{folder}: {INDEX} promises {lost[0]} in {promised[lost[0]]}, which does not hold it "
                f"({len(lost)} such tensors). Index and shards are of different versions; download them again"
            )
        moved = [name for name, at in tensors.items() if promised.get(name) != at.file]
        if moved:
            notes.append(f"{folder}: {INDEX} is out of date for {len(moved)} tensors; the shards' headers are used")
    return tensors


def _is_stacked(info: TensorInfo, section: str) -> bool:
    rank = {"weight": 3, "scales": 3, "biases": 3, "bias": 2, "global_scale": 1}[section.split(".")[1]]
    return len(info.shape) == rank


def _table(folder: Path, layer: int, parts: Mapping[str, Located], shape: ModelConfig) -> LayerTable:
    counts = {at.info.shape[0] for at in parts.values()}
    count = shape.expert_count or max(counts)
    if counts != {count} or count > MAX_EXPERTS:
        raise ConfigError(
            f"{folder}: config.json has {count} experts, the tensors of layer {layer} have {sorted(counts)}"
        )
    names = {s.split(".")[0] for s in parts}
    if names not in ({"gate_proj", "up_proj", "down_proj"}, {"fc1", "fc2"}):
        raise StreamingUnsupported(f"{folder}: layer {layer} has expert projections {sorted(names)}, unknown here")
    lacking = [f"{n}.weight" for n in sorted(names) if f"{n}.weight" not in parts]
    if lacking:
        raise CheckpointError(f"{folder}: layer {layer} lacks {lacking[0]}")
    return make_table(layer, count, {name: (at.info.dtype, at.info.shape[1:]) for name, at in parts.items()})


def _check_overrides(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Located]) -> None:
    """A quantization entry for a module must agree with the module's tensors, under whichever prefix it is keyed."""
    bare = {_bare(name): at.info for name, at in tensors.items()}
    for path, entry in quantization_overrides(config).items():
        weight, scales = (bare.get(f"{_bare(path)}.{part}") for part in ("weight", "scales"))
        group = entry.get("group_size")
        if weight is None or scales is None or type(group) is not int or group <= 0:
            continue
        if not weight.shape or not scales.shape or not scales.shape[-1]:
            raise ConfigError(
                f"{folder}: config.json calls {path} quantized, its tensors have the shapes {list(weight.shape)} and "
                f"{list(scales.shape)}. Convert the model again"
            )
        found = quantized_width(weight, scales, group)
        if found != entry["bits"]:
            raise ConfigError(
                f"{folder}: config.json claims {entry['bits']} bits (group size {group}) for {path}, "
                f"its tensors have {found}. Correct the quantization entry, or convert the model again"
            )


def _bare(name: str) -> str:
    """A name without the prefixes under which one module is known: model., language_model., in any order."""
    return re.sub(r"^(?:(?:model|language_model)\.)+", "", name)
