"""The memory plan: what is free, what each part of a running model takes of it, and so how large the slot pool is.

Knows the sizes a config and a header give, and MLX's own limits; holds no array. GB is 10^9 bytes.
Invariant: where `cache_gb` is not given, the parts of a plan add up to no more than what was free, or the pool is the
smallest that works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .budget import GB, all_bytes, cycle_bytes, minimum_bytes, split
from .checkpoint import Checkpoint
from .config import ModelConfig, text_config
from .errors import OptionError
from .layout import LayerTable
from .machine import available_bytes
from .qpack import DENSE, Container
from .safetensors import read_header
from .units import size

__all__ = [
    "GB",
    "Plan",
    "all_bytes",
    "available_bytes",
    "cycle_bytes",
    "dense_bytes",
    "limit_mlx_cache",
    "minimum_bytes",
    "plan",
    "split",
    "wire",
]

# What MLX may keep of freed buffers. Enough to reuse a decode step's temporaries, and bounded: on a Mac the default
# grows without limit (reports of machines driven into swap).
MLX_CACHE_BYTES = 128 * 1024 * 1024
CONTEXT_TOKENS = 8192  # planned for if nobody asks for a length
PROCESS_BYTES = 250_000_000  # Python, MLX, mlx-lm and a tokenizer of 250,000 entries (measured: 180 to 230 MB)
OTHERS_SHARE = 0.1  # of what is free is left to other programs and the page cache
PASS_TOKENS = 2048  # hidden states and expert results of so many tokens are alive in a prefill at once


@dataclass(frozen=True, slots=True)
class Plan:
    """What the parts of a running model take, in bytes.

    `available` is what was free before loading; `experts` is what all experts would take, more than which no pool
    needs; `cycle` what one token touches; `asked` whether the pool's size was given.
    """

    available: int
    dense: int
    kv_cache: int
    prefill: int
    mlx_cache: int
    process: int
    others: int
    pool: int
    experts: int
    cycle: int
    context_tokens: int
    asked: bool

    def __post_init__(self) -> None:
        if min(self.dense, self.kv_cache, self.prefill, self.pool, self.experts, self.cycle) < 0:
            raise ValueError("a part of a memory plan is negative")

    @property
    def process_total(self) -> int:
        """The most this process will take."""
        return self.dense + self.kv_cache + self.prefill + self.mlx_cache + self.process + self.pool

    @property
    def whole(self) -> bool:
        """Whether the pool is to have its size at once: it was asked for, or it holds every expert."""
        return self.asked or self.pool == self.experts

    @property
    def fits(self) -> bool:
        return self.process_total <= self.available

    def parts(self) -> list[tuple[str, int]]:
        """Name and bytes of each part, in the order they are taken from what is free."""
        return [
            ("free on this machine", self.available),
            ("left to other programs", self.others),
            ("dense weights", self.dense),
            (f"context of {self.context_tokens} tokens", self.kv_cache),
            ("reading prompts", self.prefill),
            ("buffers MLX keeps", self.mlx_cache),
            ("Python and libraries", self.process),
            ("expert slots" if self.asked else "expert slots (what is left)", self.pool),
        ]

    def table(self) -> str:
        """The parts as lines of text."""
        lines = [f"{name:<32}{size(n):>10}" for name, n in self.parts()]
        share = 100 * self.pool / self.experts if self.experts else 100.0
        lines.append(f"{'this process at most':<32}{size(self.process_total):>10}")
        lines.append(f"slots hold {share:.0f} % of the experts; one token touches {size(self.cycle)}")
        return "\n".join(lines)


def plan(
    opened: Container | Checkpoint,
    tables: Mapping[int, LayerTable],
    config: Mapping[str, Any],
    cache_gb: float | None = None,
    context_tokens: int | None = None,
    available: int | None = None,
) -> Plan:
    """Divide memory.

    Args:
        opened: the model's files.
        tables: its layers with experts.
        config: its parsed config.json.
        cache_gb: the pool in GB; None takes what the other parts leave.
        context_tokens: to plan for; None takes `CONTEXT_TOKENS`, or the model's own limit if that is less.
        available: free bytes; None asks the machine.

    Returns:
        The plan. Its pool holds one expert a layer and one layer's choice at least.

    Raises:
        OptionError: `cache_gb` is no size.
    """
    shape = ModelConfig.from_dict(config, "config.json")
    free = available_bytes() if available is None else available
    context = context_tokens or min(CONTEXT_TOKENS, shape.context or CONTEXT_TOKENS)
    dense = dense_bytes(opened)
    kv = context * kv_bytes_per_token(config, shape)
    prefill = prefill_bytes(config, shape.top_k)
    others = int(free * OTHERS_SHARE)
    experts, least = all_bytes(tables), minimum_bytes(tables, shape.top_k)
    if cache_gb is None:
        left = free - others - dense - kv - prefill - MLX_CACHE_BYTES - PROCESS_BYTES
        pool = min(experts, max(left, least))
    elif 0 < cache_gb < 1e6:
        pool = min(experts, round(cache_gb * GB))
    else:
        raise OptionError(f"--cache-gb {cache_gb} is not a size; give the slot pool in GB, for example --cache-gb 2")
    return Plan(
        available=free,
        dense=dense,
        kv_cache=kv,
        prefill=prefill,
        mlx_cache=MLX_CACHE_BYTES,
        process=PROCESS_BYTES,
        others=others,
        pool=pool,
        experts=experts,
        cycle=cycle_bytes(tables, shape.top_k),
        context_tokens=context,
        asked=cache_gb is not None,
    )


def limit_mlx_cache() -> None:
    """Bound what MLX keeps of freed buffers. To be called before the first weight is loaded."""
    mx.set_cache_limit(MLX_CACHE_BYTES)


def wire(plan: Plan) -> None:
    """On a Mac, let MLX keep what the plan takes in physical memory. To be called before the first weight."""
    if mx.metal.is_available():  # not run here
        most = int(mx.device_info()["max_recommended_working_set_size"])
        mx.set_wired_limit(min(plan.process_total, most))


def dense_bytes(opened: Container | Checkpoint) -> int:
    """Bytes of the weights that stay resident."""
    if isinstance(opened, Container):
        return sum(t.nbytes for t in read_header(opened.path / DENSE).tensors.values())
    return sum(at.info.nbytes for at in opened.dense.values())


def kv_bytes_per_token(config: Mapping[str, Any], shape: ModelConfig) -> int:
    """What a token adds to the caches of the attention layers, in 16 bits; compressed caches (MLA) as they are."""
    text = text_config(config)
    attention = shape.layer_count - sum(shape.linear_layers)
    latent = _count(text, "kv_lora_rank")
    if latent:
        return attention * 2 * (latent + _count(text, "qk_rope_head_dim"))
    all_heads = _count(text, "num_attention_heads")
    heads = _count(text, "num_key_value_heads") or all_heads
    width = _count(text, "head_dim") or _count(text, "hidden_size") // max(1, all_heads)
    return attention * 2 * heads * width * 2


def prefill_bytes(config: Mapping[str, Any], top_k: int) -> int:
    """What a pass over a prompt has alive at once beside the slots: hidden states, and each choice's inputs, inner
    activations and results, in 32 bits where they are added up."""
    text = text_config(config)
    hidden = _count(text, "hidden_size")
    inner = _count(text, "moe_intermediate_size") or _count(text, "intermediate_size")
    return PASS_TOKENS * (8 * 4 * hidden + max(1, top_k) * (3 * hidden + 3 * inner) * 2)


def _count(text: Mapping[str, Any], key: str) -> int:
    """A number of config.json, 0 where it gives none that can be meant."""
    value = text.get(key)
    return value if type(value) is int and 0 < value < 1 << 32 else 0
