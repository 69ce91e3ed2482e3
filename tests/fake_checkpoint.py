"""MLX checkpoint folders of random bytes: right headers, right names, no meaning. Any size, written in
bounded memory.

Knows safetensors headers and the tensor names of qwen3_moe and qwen3_5_moe; imports no mlx. Invariant: the
same arguments give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swiftlet_mlx.layout import layout_json, make_table
from swiftlet_mlx.qpack import CONFIG, DENSE, HASHES, LAYOUT, MANIFEST
from swiftlet_mlx.safetensors import build_header, tensor_bytes

Tensor = tuple[str, str, tuple[int, ...]]
_BLOCK = 1 << 20


def tensors(
    *, layers: int, experts: int, hidden: int, inner: int, vocab: int, prefix: str = "", quantized: bool = True
) -> Iterator[Tensor]:
    """Names, dtypes and shapes in the order mlx-lm writes them: 4 bits in groups of 32, or float32."""

    def linear(name: str, *shape: int) -> Iterator[Tensor]:
        if not quantized:
            yield f"{name}.weight", "F32", shape
            return
        *lead, out, width = shape
        yield f"{name}.weight", "U32", (*lead, out, width // 8)
        yield f"{name}.scales", "F16", (*lead, out, width // 32)
        yield f"{name}.biases", "F16", (*lead, out, width // 32)

    yield f"{prefix}model.embed_tokens.weight", "F16", (vocab, hidden)
    for n in range(layers):
        at = f"{prefix}model.layers.{n}"
        yield f"{at}.input_layernorm.weight", "F32", (hidden,)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from linear(f"{at}.self_attn.{part}", hidden, hidden)
        yield f"{at}.mlp.gate.weight", "F32", (experts, hidden)
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            yield from linear(f"{at}.mlp.switch_mlp.{part}_proj", experts, *shape)
    yield f"{prefix}model.norm.weight", "F32", (hidden,)
    yield from linear(f"{prefix}lm_head", vocab, hidden)


def make_checkpoint(
    folder: Path,
    *,
    layers: int = 2,
    experts: int = 4,
    hidden: int = 64,
    inner: int = 32,
    vocab: int = 64,
    shards: int = 2,
    quantized: bool = True,
    vision: bool | int = False,
    mtp: bool = False,
    seed: int = 0,
) -> Path:
    """Write a checkpoint folder with config, index, tokenizer files and `shards` shards; returns the folder.

    Args:
        vision: with a vision tower, of so many blocks if it is a number; it comes after all other tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {
        "layers": layers, "experts": experts, "hidden": hidden, "inner": inner, "vocab": vocab
    }  # fmt: skip
    prefix = "language_model." if vision else ""
    every = list(tensors(**sizes, prefix=prefix, quantized=quantized))
    if vision:
        every += [
            (f"vision_tower.blocks.{n}.attn.qkv.weight", "F16", (hidden, 3 * hidden))
            for n in range(2 if vision is True else vision)
        ]
    if mtp:
        every += [("mtp.fc.weight", "F16", (hidden, 2 * hidden)), ("mtp.norm.weight", "F32", (hidden,))]
    config: dict[str, Any] = {
        "model_type": "qwen3_5_moe" if vision else "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": min(2, experts),
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    if quantized:
        config["quantization"] = {"group_size": 32, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (folder / "README.md").write_text("# a model card\n")
    rng = random.Random(seed)
    total = sum(tensor_bytes(dtype, shape) for _, dtype, shape in every)
    parts: list[list[Tensor]] = [[] for _ in range(shards)]
    at = 0
    for tensor in every:
        parts[min(shards - 1, at * shards // total)].append(tensor)
        at += tensor_bytes(tensor[1], tensor[2])
    weight_map: dict[str, str] = {}
    for n, part in enumerate(parts, start=1):
        name = f"model-{n:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        with (folder / name).open("wb") as stream:
            stream.write(build_header(part, {"format": "mlx"}))
            left = sum(tensor_bytes(dtype, shape) for _, dtype, shape in part)
            while left:
                stream.write(rng.randbytes(min(left, _BLOCK)))
                left -= min(left, _BLOCK)
        weight_map.update(dict.fromkeys((tensor[0] for tensor in part), name))
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def make_container(
    path: Path,
    *,
    layers: int = 2,
    experts: int = 4,
    side: int = 32,
    source: str = "",
    hashes: bool = True,
    extra: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a version 1 container whose manifest, layout, config and sizes agree; returns its folder.

    Args:
        side: experts are three float32 squares of this side.
        extra: entries to add to, or replace in, the manifest.
    """
    rng = random.Random(seed)
    (path / "packed_experts").mkdir(parents=True)
    parts = {f"{p}_proj.weight": ("F32", (side, side)) for p in ("gate", "up", "down")}
    tables = {n: make_table(n, experts, parts) for n in range(layers)}
    for table in tables.values():
        (path / table.file_name).write_bytes(rng.randbytes(table.file_bytes))
    (path / LAYOUT).write_bytes(layout_json(tables, layers, (False,) * layers))
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 2
    }  # fmt: skip
    (path / CONFIG).write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    dense: list[Tensor] = [("model.norm.weight", "F32", (1000,))]
    (path / DENSE).write_bytes(build_header(dense) + rng.randbytes(4000))
    files = {f.relative_to(path).as_posix(): f.stat().st_size for f in sorted(path.rglob("*")) if f.is_file()}
    manifest: dict[str, Any] = {
        "magic": "QPACK", "version": 1, "modelName": "qwen3_moe", "sourceCheckpoint": source, "quantBits": 4,
        "quantGroupSize": 64, "files": files, **(extra or {}),
    }  # fmt: skip
    (path / MANIFEST).write_text(json.dumps(manifest))
    if hashes:
        put_hashes(path)
    return path


def put_hashes(path: Path) -> None:
    """Write the folder's `hashes.json`."""
    files = {f.relative_to(path).as_posix(): f for f in sorted(path.rglob("*")) if f.is_file()}
    files.pop(HASHES, None)
    table = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    (path / HASHES).write_text(json.dumps({"files": table}))
