"""Shapes of released models, as their config.json gives them, and smaller ones of the same kind for tests.

Numbers only: no weights, no files, no mlx. The large ones are those of Qwen/Qwen3-Next-80B-A3B-Instruct,
Qwen/Qwen3.6-35B-A3B and Qwen/Qwen3.5-397B-A17B (text part), copied 2026-12-01. Invariant: `preset` returns a config
that mlx-lm builds as it builds the real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftlet_mlx.errors import OptionError

_ROPE = {
    "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
    "mrope_interleaved": True, "mrope_section": [11, 11, 10],
}  # fmt: skip
_DELTA = {
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_value_heads": 32, "full_attention_interval": 4,
}  # fmt: skip
_SHARED = {
    "head_dim": 256, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144,
    "attention_bias": False, "tie_word_embeddings": False, "decoder_sparse_step": 1, "norm_topk_prob": True,
    "mlp_only_layers": [],
}  # fmt: skip

QWEN3_NEXT_80B: dict[str, Any] = {
    **_SHARED, **_DELTA, "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 16, "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 151_936,
    "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN35_35B: dict[str, Any] = {
    **_SHARED, **_DELTA, "model_type": "qwen3_5_moe", "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 248_320,
    "rope_parameters": _ROPE,
}  # fmt: skip
QWEN35_397B: dict[str, Any] = {
    **_SHARED, **_DELTA, "model_type": "qwen3_5_moe", "hidden_size": 4096, "num_hidden_layers": 60,
    "num_attention_heads": 32, "intermediate_size": 1024, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "vocab_size": 248_320,
    "linear_num_value_heads": 64, "rope_parameters": _ROPE,
}  # fmt: skip

_SMALL_HEADS = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "max_position_embeddings": 32_768,
}  # fmt: skip
# For tests: runs in milliseconds on any CPU.
TINY: dict[str, Any] = {
    **QWEN3_NEXT_80B, **_SMALL_HEADS, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64,
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "vocab_size": 512,
}  # fmt: skip
# For one machine without a GPU: expert blobs about as large as the real ones when written in float32 (1.6 MB, 2.4 GB
# in all), so that reading costs what it costs there while computing stays cheap.
MEDIUM: dict[str, Any] = {
    **QWEN35_35B, **_SMALL_HEADS, "hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 256,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256, "vocab_size": 8192, "num_attention_heads": 8, "head_dim": 64,
}  # fmt: skip

PRESETS: Mapping[str, dict[str, Any]] = {
    "qwen3-next-80b": QWEN3_NEXT_80B,
    "qwen3.6-35b": QWEN35_35B,
    "qwen3.5-397b": QWEN35_397B,
    "medium": MEDIUM,
    "tiny": TINY,
}

RELEASED = ("qwen3.6-35b", "qwen3-next-80b", "qwen3.5-397b")


def preset(
    name: str, *, layers: int | None = None, experts: int | None = None, vocab: int | None = None
) -> dict[str, Any]:
    """A config.json of a preset, made smaller where asked.

    Args:
        name: One of `PRESETS`.
        layers: Number of layers.
        experts: Routed experts a layer.
        vocab: Size of the vocabulary.

    Raises:
        OptionError: for a name or number that is not possible.
    """
    if name not in PRESETS:
        raise OptionError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    wanted = {"num_hidden_layers": layers, "num_experts": experts, "vocab_size": vocab}
    text = {**PRESETS[name], **{k: v for k, v in wanted.items() if v is not None}}
    if text["num_hidden_layers"] < 1 or text["num_experts"] < text["num_experts_per_tok"] or text["vocab_size"] < 300:
        raise OptionError(
            f"preset {name}: at least 1 layer, {text['num_experts_per_tok']} experts and 300 tokens are needed"
        )
    return nested(text)


def nested(text: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as published: Qwen3.5 keeps the language model's settings in `text_config`."""
    if text["model_type"] != "qwen3_5_moe" or "text_config" in text:
        return dict(text)
    return {
        "model_type": "qwen3_5_moe",
        "text_config": {**text, "model_type": "qwen3_5_moe_text"},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
