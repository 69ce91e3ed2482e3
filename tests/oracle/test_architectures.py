"""Streamed against stock for every architecture of mlx-lm whose experts are switch layers: equal to the last bit.

Configs are as small as each architecture allows; a setting that an architecture does not know is left out of its
config. Some take no part in layer-major prefill; they must be right all the same.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from tiny import random_model

from swiftlet_mlx import memory
from swiftlet_mlx.checkpoint import open_checkpoint
from swiftlet_mlx.loader import load_streamed

LAYERS, EXPERTS, TOP_K = 4, 8, 2
WINDOWS = ["sliding_attention", "full_attention"] * 2
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1}  # fmt: skip
EXPERT_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
COMMON: dict[str, Any] = {
    **dict.fromkeys(EXPERT_COUNT, EXPERTS), **dict.fromkeys(CHOICES, TOP_K),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("num_hidden_layers", "num_layers"), LAYERS), "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "partial_rotary_factor": 0.5, "tie_word_embeddings": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1,
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "use_qk_norm": True, "sliding_window": 16,
    "mlp_only_layers": [], "decoder_sparse_step": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 16, "conv_kernel": 4,
         "n_groups": 1, "use_conv_bias": True, "hybrid_override_pattern": list("ME*E")}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": WINDOWS},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe": {},
    "bailing_moe_v3": {},
    "deepseek": {},
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", "rope_scaling": YARN},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v41": {},
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    "exaone_moe": {"layer_types": WINDOWS, "is_moe_layer": [False, True, True, True]},
    "gemma4_text": {"enable_moe_block": True, "num_kv_shared_layers": 0, "global_head_dim": 32,
                    "sliding_window_pattern": 2, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 2,
                    "tie_word_embeddings": True},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gpt_oss": {"layer_types": WINDOWS, "intermediate_size": 32},
    "granitemoe": {"logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0,
                   "residual_multiplier": 1.0},
    "granitemoehybrid": {"logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0,
                         "residual_multiplier": 1.0, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4,
                         "mamba_d_head": 16, "mamba_proj_bias": False, "mamba_d_state": 16, "mamba_d_conv": 4,
                         "mamba_n_groups": 1, "mamba_conv_bias": True},
    "hunyuan": {"use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
                "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
              "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2},
    "kimi_linear": {"model_max_length": 4096,
                    "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4,
                                           "head_dim": 32, "short_conv_kernel_size": 4}},
    "Klear": {},
    "laguna": {},
    "lfm2_moe": {"use_expert_bias": True, "conv_bias": False, "conv_L_cache": 3,
                 "layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"text_config": {**COMMON, "model_type": "llama4_text", "attention_chunk_size": 16, "attn_scale": 0.1,
                               "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64, "intermediate_size": 32,
                               "attn_temperature_tuning": True, "floor_scale": 8192, "no_rope_layers": [1, 1, 1, 0],
                               "num_experts_per_tok": 1, "moe_layers": None}},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 64,
                      "expert_ffn_hidden_size": 32, "zero_expert_num": 4, "mla_scale_q_lora": True,
                      "mla_scale_kv_lora": True},
    "mellum": {"layer_types": WINDOWS,
               "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in WINDOWS}},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1],
                      "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
                      "sliding_window_size": 16, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                      "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
                      "swa_head_dim": 32, "swa_v_head_dim": 32, "n_shared_experts": None},
    "minimax": {"rotary_dim": 16},
    "mistral4": {"rope_parameters": {**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}},
    "mixtral": {},
    "nemotron_h": {**MAMBA, "moe_latent_size": 32},
    "olmoe": {},
    "phimoe": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
                                "short_mscale": 1.0, "long_mscale": 1.0}},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "step3p5": {"num_attention_groups": 2, "share_expert_dim": 32, "moe_layers_enum": "1,2,3", "layer_types": WINDOWS,
                "swiglu_limits": [0.0, 7.0, 0.0, 7.0], "swiglu_limits_shared": [0.0] * 4},
}  # fmt: skip
# One of each kind: compressed attention, GeGLU, biases and a window, one expert a token, two attentions and identity
# experts, a latent space.
QUICK = {"deepseek_v3", "gemma4_text", "gpt_oss", "llama4", "longcat_flash", "nemotron_h"}
TOKENS = [(7 * n * n + 3 * n) % 100 for n in range(60)]


def make(folder: Path, kind: str, bits: int | None) -> Path:
    """A checkpoint of this architecture with random weights."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    known = {field.name for field in dataclasses.fields(module.ModelArgs)}
    config = {k: v for k, v in (COMMON | OWN[kind]).items() if k in known} | {"model_type": kind}
    model = random_model(config)
    if bits is not None:
        model, config = quantize_model(model, config, 32, bits)
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def fed(model: Any, pieces: tuple[int, ...]) -> mx.array:
    """Logits of all tokens, fed in pieces through a cache."""
    cache, at, out = make_prompt_cache(model), 0, []
    for n in pieces:
        out.append(model(mx.array([TOKENS[at : at + n]]), cache=cache)[0])
        at += n
    result = mx.concatenate(out)
    mx.eval(result)
    return result


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        pytest.param(kind, bits, marks=() if kind in QUICK and bits else pytest.mark.slow)
        for kind in OWN
        for bits in (4, None)
    ],
)
def test_every_architecture_answers_as_stock_does(tmp_path: Path, kind: str, bits: int | None) -> None:
    folder = make(tmp_path / "model", kind, bits)
    stock, _ = load_model(folder)
    checkpoint = open_checkpoint(folder)
    least = memory.minimum_bytes(checkpoint.tables, checkpoint.shape.top_k)
    pieces = (37, 1, 1, 1, 5, 1, 14)
    expected = fed(stock, pieces)
    assert not mx.any(mx.isnan(expected)).item()
    for budget in (least, checkpoint.expert_bytes // 2, checkpoint.expert_bytes):
        streamed, _ = load_streamed(folder, cache_gb=budget / memory.GB)
        assert mx.array_equal(fed(streamed, pieces), expected).item(), budget
        streamed.pools.close()
