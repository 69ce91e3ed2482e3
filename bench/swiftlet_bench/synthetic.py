"""Containers with random weights in a real model's shapes, for measuring speed where the real weights are not at hand.

Knows the container format and how mlx-lm builds a model; the weights mean nothing, but have the scale of a fresh
initialisation, so that activations stay finite and the router spreads its choices. Invariant: the same arguments on
the same backend give the same expert files; nothing larger than one layer's experts is in memory beside the dense part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from swiftlet_mlx._compat import SwitchLinear, get_model_classes
from swiftlet_mlx.qpack import CONFIG, DENSE, LAYOUT, MANIFEST, LayerTable, layout_json, make_table, to_json

QWEN35_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
    "moe_intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
"""Shapes of Qwen3.5/3.6-35B-A3B as its config.json gives them."""


def make_container(
    folder: Path,
    config: Mapping[str, Any],
    *,
    bits: int = 4,
    group_size: int = 64,
    dtype: mx.Dtype = mx.bfloat16,
    seed: int = 0,
) -> Path:
    """Write a container of random weights.

    Args:
        folder: NAME.qpack, which must not exist.
        config: a model's config; every layer must have experts.
        bits: of all quantized weights; the router and the shared expert's gate are left unquantized.
        group_size: of the quantization.
        dtype: of everything that is not quantized, bfloat16 or float32.
        seed: of the weights.

    Returns:
        The folder.
    """
    (folder / LAYOUT).parent.mkdir(parents=True)
    mx.random.seed(seed)
    model_class, args_class = get_model_classes(dict(config))
    model = model_class(args_class.from_dict(dict(config)))
    model.set_dtype(dtype)

    def quantized(path: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and not path.endswith("gate") and not isinstance(module, SwitchLinear)

    nn.quantize(model, group_size, bits, class_predicate=quantized)
    flat: Any = tree_flatten(model.parameters())
    dense = {k: v for k, v in flat if ".switch_mlp." not in k}
    mx.save_safetensors(str(folder / DENSE), dense, {"format": "mlx"})

    tables: dict[int, LayerTable] = {}
    rng = np.random.default_rng(seed)
    tag = "BF16" if dtype == mx.bfloat16 else "F32"
    base: np.ndarray | None = None
    for n, layer in enumerate(model.layers):
        glu = layer.mlp.switch_mlp
        parts: dict[str, tuple[str, tuple[int, ...]]] = {}
        bounds = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            _, out, width = glu[name].weight.shape
            parts[f"{name}.weight"] = ("U32", (out, width * bits // 32))
            parts[f"{name}.scales"] = parts[f"{name}.biases"] = (tag, (out, width // group_size))
            bounds[name] = width**-0.5
        tables[n] = table = make_table(n, glu.gate_proj.weight.shape[0], parts)
        if base is None:
            base = _experts(table, bounds, bits, dtype, rng)
        np.roll(base, n, axis=0).tofile(folder / table.file_name)  # the same experts, numbered otherwise

    linear = tuple(bool(getattr(layer, "is_linear", False)) for layer in model.layers)
    width_json = {"group_size": group_size, "bits": bits}
    (folder / LAYOUT).write_bytes(layout_json(tables, len(tables), linear))
    (folder / CONFIG).write_text(
        json.dumps({**config, "quantization": width_json, "quantization_config": width_json}, indent=1)
    )
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    manifest = {
        "magic": "QPACK",
        "version": 1,
        "modelName": config["model_type"],
        "sourceCheckpoint": "random weights",
        "quantBits": bits,
        "quantGroupSize": group_size,
        "files": sizes,
    }
    (folder / MANIFEST).write_bytes(to_json(manifest))
    return folder


def _experts(
    table: LayerTable, bounds: Mapping[str, float], bits: int, dtype: mx.Dtype, rng: np.random.Generator
) -> np.ndarray:
    """Blobs `[expert_count, stride]` whose weights are uniform in +-bound when dequantized."""
    blobs = np.zeros((table.expert_count, table.stride), np.uint8)
    for section in table.sections:
        projection, part = section.name.split(".")
        at = slice(section.offset, section.offset + section.size)
        if part == "weight":
            blobs[:, at] = rng.integers(0, 256, (table.expert_count, section.size), np.uint8)
        else:
            bound = bounds[projection]
            value = 2 * bound / (2**bits - 1) if part == "scales" else -bound
            filled = mx.full(section.shape, value).astype(dtype)
            mx.eval(filled)
            blobs[:, at] = np.array(filled.view(mx.uint8)).reshape(-1)
    return blobs
