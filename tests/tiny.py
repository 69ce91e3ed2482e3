"""Tiny checkpoints with random weights, written by stock mlx-lm as a real conversion writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model
from swiftlet_bench import bytetokenizer

DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip


def make_config(
    kind: str, layers: int = 4, experts: int = 8, top_k: int = 2, hidden: int = 64, vocab: int = 128
) -> dict[str, Any]:
    """A config.json for one of the architectures the tests prove."""
    shared: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": vocab,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "num_experts": experts,
        "num_experts_per_tok": top_k, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    }  # fmt: skip
    if kind == "qwen3_next":
        rope: dict[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        extra = {"shared_expert_intermediate_size": 32, "mlp_only_layers": []}
        return {"model_type": kind, **shared, **DELTA, **rope, **extra}
    if kind == "qwen3_5_moe":
        rope = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        text = {**shared, **DELTA, "model_type": "qwen3_5", "shared_expert_intermediate_size": 32}
        return {"model_type": kind, "text_config": {**text, "rope_parameters": rope}}
    if kind == "qwen3_moe":
        return {"model_type": kind, **shared, "rope_theta": 10000.0, "mlp_only_layers": []}
    if kind == "gpt_oss":  # experts with a bias
        del shared["num_experts"]
        own = {"num_local_experts": experts, "sliding_window": 32, "rope_theta": 10000}
        kinds = ["sliding_attention" if n % 2 == 0 else "full_attention" for n in range(layers)]
        return {"model_type": kind, **shared, **own, "intermediate_size": 32, "layer_types": kinds}
    if kind == "nemotron_h":  # fc1 and fc2; most layers have no experts
        del shared["num_experts"]
        mamba: dict[str, Any] = {
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
        }
        no_bias = dict.fromkeys(("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"), False)
        counts: dict[str, Any] = {
            "n_routed_experts": experts,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        }
        rest = {
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "hybrid_override_pattern": ("ME*E" * layers)[:layers],
        }
        return {"model_type": kind, **shared, **mamba, **no_bias, **counts, **rest}
    raise ValueError(kind)


def make_checkpoint(
    folder: Path,
    kind: str = "qwen3_next",
    bits: int | str | None = None,
    mode: str = "affine",
    dtype: mx.Dtype = mx.float32,
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool = False,
    shape: dict[str, int] | None = None,
    **overrides: Any,
) -> Path:
    """Write a checkpoint folder.

    Args:
        folder: To be made.
        kind: `qwen3_next`, `qwen3_5_moe`, `qwen3_moe`, `gpt_oss` or `nemotron_h`.
        bits: None, a width, or `mixed`: experts of 4 bits, those of layer 1 of 8, one `down_proj` of 6; or `widths`:
            experts of 4 bits, every `down_proj` of 8.
        mode: Of the quantization: `affine`, `mxfp4`, `mxfp8`, or `nvfp4`, that with a scale of its own an expert.
        dtype: Of everything that is not quantized.
        shards: Files to spread the tensors over; more than one comes with an index.
        seed: Of the weights.
        tokenizer: Add a byte-level tokenizer and a chat template.
        shape: `layers`, `experts`, `top_k`, `hidden`, `vocab`.
        overrides: Settings of the (text) config to replace.

    Returns:
        `folder`.
    """
    config = make_config(kind, **(shape or {}))
    config.get("text_config", config).update(overrides)
    folder.mkdir(parents=True)
    model = random_model(config, dtype, seed)
    if bits is not None:
        model, config = quantize_model(
            model, config, 16 if mode == "nvfp4" else 32, int(bits) if isinstance(bits, int) else 4, mode,
            global_scale=mode == "nvfp4", quant_predicate=_predicate(bits, mode)
        )  # fmt: skip
    save_model(folder, model)
    save_config(config, folder / "config.json")
    if shards > 1:
        _reshard(folder, shards)
    if tokenizer:
        add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of the 95 printable characters of ASCII and Qwen's special tokens, with a small chat template."""
    from tokenizers import pre_tokenizers

    alphabet = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(c))[0][0] for c in range(32, 127)]
    bytetokenizer.write(folder, alphabet, newline=" ")


def random_model(config: dict[str, Any], dtype: mx.Dtype = mx.float32, seed: int = 0) -> nn.Module:
    """Weights large enough that logits differ clearly and greedy output wanders."""
    model_class, args = _get_classes(config)
    model = model_class(args.from_dict(config))
    key = mx.random.key(seed)
    weights = []
    for name, value in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())):
        key, own = mx.random.split(key)
        if "A_log" in name:
            new = mx.log(mx.random.uniform(0.5, 16, value.shape, key=own))
        elif value.ndim < 2:
            new = 1 + 0.1 * mx.random.normal(value.shape, key=own)
        else:
            new = mx.random.normal(value.shape, key=own) * (1.5 / value.shape[-1] ** 0.5)
        weights.append((name, new.astype(value.dtype if "A_log" in name else dtype)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _predicate(bits: int | str, mode: str) -> Any:
    if mode != "affine":
        return lambda path, module: path.endswith(("_proj", "fc1", "fc2"))  # a router of its own width is affine only
    if bits == "widths":
        return lambda path, module: {"group_size": 32, "bits": 8} if path.endswith("switch_mlp.down_proj") else True
    if bits != "mixed":
        return None

    def predicate(path: str, module: nn.Module) -> Any:
        if "switch_mlp" in path and ".layers.1." in path:
            return {"group_size": 32, "bits": 8}
        if path.endswith(".layers.2.mlp.switch_mlp.down_proj"):
            return {"group_size": 32, "bits": 6}
        return True

    return predicate


def _reshard(folder: Path, shards: int) -> None:
    whole = folder / "model.safetensors"
    weights = dict(mx.load(str(whole)))  # type: ignore[arg-type]
    mx.eval(*weights.values())
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[n::shards]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
