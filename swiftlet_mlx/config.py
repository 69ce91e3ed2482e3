"""What config.json says, in one spelling, whichever of the field's spellings it uses.

Knows JSON only: no tensors, no mlx. Used by the repacker, the loader and `info` alike, so that a model is understood
the same way everywhere. Invariant: counts are positive and bounded, or zero where the config does not give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .jsonfile import read_object

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k",
    "num_selected_experts", "experts_per_token",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_KINDS = ("layers_block_type", "hybrid_override_pattern", "layer_types")
_CONTEXT = ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers this project needs from a config.

    `top_k` is the number of routed experts a token uses, 0 if unknown; `context` is in tokens, 0 if unknown.
    """

    model_type: str
    layer_count: int
    expert_count: int
    top_k: int
    context: int
    linear_layers: tuple[bool, ...]
    tied: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> ModelConfig:
        """Read a parsed config.json; text settings may sit at the top or in `text_config`.

        Raises:
            ConfigError: if there is no model type or no layer count.
        """
        text = text_config(config)
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type.isidentifier():
            raise ConfigError(f"{where}: model_type is {model_type!r}; without one the model cannot be built")
        layers = _first(config, text, _LAYERS, 4096) or _listed_layers(text)
        if not layers:
            raise ConfigError(f"{where}: none of {', '.join(_LAYERS)} gives the number of layers")
        return cls(
            model_type=model_type,
            layer_count=layers,
            expert_count=_first(config, text, _EXPERTS, 65_536),
            top_k=_first(config, text, _TOP_K, 65_536),
            context=_first(config, text, _CONTEXT, 1 << 40),
            linear_layers=_linear_layers(text, layers),
            tied=_tied(config, text),
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a model folder.

    Raises:
        ConfigError: if it is missing, too large, or not a JSON object.
    """
    return read_object(folder / "config.json", ConfigError, advice="is this a model folder?")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own settings: `text_config` where there is one, else the config itself."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def for_mlx_lm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Top-level keys to override so that mlx-lm understands a config as its author meant it.

    - `model_file` is dropped: no code from a model folder is run.
    - the tie flag of a nested config is taken from the top level where only that has it;
    - transformers 5 names: `qwen3_5_moe_text` without nesting, rope settings inside `rope_parameters`;
    - quantization overrides a path are dropped: widths follow from the tensors' shapes (and are checked apart).
    """
    override: dict[str, Any] = {"model_file": None}
    text = config.get("text_config")
    if isinstance(text, dict) and "tie_word_embeddings" in config and "tie_word_embeddings" not in text:
        override["text_config"] = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
    if str(config.get("model_type", "")).endswith("_moe_text"):
        override["model_type"] = str(config["model_type"]).removesuffix("_text")
    rope = config.get("rope_parameters")
    if config.get("model_type") == "qwen3_next" and isinstance(rope, dict):
        for key in ("rope_theta", "partial_rotary_factor"):
            if key not in config and key in rope:
                override[key] = rope[key]
    for key in ("quantization", "quantization_config"):
        if isinstance(config.get(key), dict):
            override[key] = {k: v for k, v in config[key].items() if not isinstance(v, (dict, bool))}
    return override


def quantization_overrides(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The per-module entries of the quantization settings: module path as written to {"bits", "group_size"}."""
    settings = config.get("quantization") or config.get("quantization_config") or {}
    if not isinstance(settings, dict):
        return {}
    return {k: v for k, v in settings.items() if isinstance(v, dict) and type(v.get("bits")) is int}


def _first(config: Mapping[str, Any], text: Mapping[str, Any], keys: tuple[str, ...], limit: int) -> int:
    for place in (text, config):
        for key in keys:
            value = place.get(key)
            if type(value) is int and 0 < value <= limit:
                return value
    return 0


def _listed_layers(text: Mapping[str, Any]) -> int:
    """The number of layers where only their kinds are listed, one a layer."""
    kinds = next((text[key] for key in _KINDS if isinstance(text.get(key), (list, str))), ())
    return len(kinds) if len(kinds) <= 4096 else 0


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def _linear_layers(text: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(k == "linear_attention" for k in kinds)
    interval = text.get("full_attention_interval")
    if type(interval) is int and interval > 0 and "linear_num_value_heads" in text:
        return tuple((n + 1) % interval != 0 for n in range(layers))
    return (False,) * layers
