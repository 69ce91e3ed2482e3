"""How long a conversation may become: what the model was made for, and what memory holds.

Knows a model's arguments and caches, and the machine's memory; no threads, no text.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from . import memory
from .timeline import CUTTABLE

CACHE_BYTES = 2  # of one element of a key-value cache: every released checkpoint keeps them in 16 bits
SHARE_OF_CONVERSATION = 0.5  # of what is free once the model is loaded; the rest is for the passes themselves
SHARE_OF_STORE = 0.125
MAX_STORE_BYTES = 10**9


def stated(model: Any, name: str) -> int | None:
    """A number from the model's arguments, wherever its family keeps them; None if it has none."""
    for holder in (model, getattr(model, "language_model", None)):
        args = getattr(holder, "args", None)
        nested = getattr(args, "text_config", None)
        for value in (getattr(args, name, None), nested.get(name) if isinstance(nested, dict) else None):
            if isinstance(value, int) and value > 0:
                return value
    return None


def bytes_per_token(model: Any) -> int:
    """What a token adds to the key-value caches; 0 if the model's arguments do not say."""
    heads, width = stated(model, "num_key_value_heads"), stated(model, "head_dim")
    if width is None:
        hidden, all_heads = stated(model, "hidden_size"), stated(model, "num_attention_heads")
        width = hidden // all_heads if hidden and all_heads else None
    if heads is None or width is None:
        return 0
    growing = sum(type(cache) in CUTTABLE for cache in make_prompt_cache(model))
    return growing * 2 * heads * width * CACHE_BYTES


def free_bytes() -> int:
    """Memory left to this process now that the model is loaded."""
    # On Linux what is taken is no longer available; the figure for macOS counts the whole machine.
    taken = mx.get_active_memory() if sys.platform == "darwin" else 0
    return max(0, memory.available_bytes() - taken)


def longest(model: Any, free: int) -> tuple[int | None, str]:
    """The longest prompt plus reply, and what sets the limit: "model" or "memory". None if nothing does."""
    own, each = stated(model, "max_position_embeddings"), bytes_per_token(model)
    fits = int(free * SHARE_OF_CONVERSATION) // each if each else None
    if fits is not None and (own is None or fits < own):
        return max(1, fits), "memory"
    return own, "model"


def store_bytes(free: int) -> int:
    """A budget for past conversations."""
    return min(MAX_STORE_BYTES, int(free * SHARE_OF_STORE))
