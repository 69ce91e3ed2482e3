"""A whole prompt into the caches of a model, each routed expert read at most once, however long it is.

The layers do the work (layer_major.py); this is what is said and done around it: refuse what does not fit before
anything is read, tell how far it has come, and put the caches back when it is broken off. Knows models and caches;
knows nothing of experts. Invariant: after an exception every cache that can be put back holds what it held before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from .errors import ContextFull
from .layer_major import part_of


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far a prefill has come."""

    tokens: int
    """Of the prompt, in whole-model equivalents: half the layers done count as half the tokens."""
    total_tokens: int
    layers: int
    n_layers: int
    seconds: float
    seconds_left: float


def prefill(
    model: nn.Module,
    tokens: mx.array | Sequence[int],
    cache: list[Any],
    *,
    progress: Callable[[int, int], None] | None = None,
    watch: Callable[[PrefillProgress], None] | None = None,
) -> None:
    """Feed a prompt, or the rest of one, to the model and fill its caches.

    Give it all tokens of a prompt but the last, and the last to the model or to `generate_step`, as mlx-lm's own
    prefill does.

    Args:
        model: what `swiftlet_mlx.load` has returned. Any other model is fed in one call, without progress.
        tokens: `[n]` token ids.
        cache: from `make_prompt_cache`, empty or holding the tokens before these.
        progress: called with (tokens done, tokens) after every chunk of tokens and every group of experts. It may
            raise, to stop: the exception passes through.
        watch: the same, with times and layers.

    Raises:
        ContextFull: the prompt is longer than the model's context. Nothing has been read.
        ReadFailed: an expert could not be read.
    """
    ids = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
    if ids.size == 0:
        return
    check_context(model, ids.size, cache)

    def tell(p: PrefillProgress) -> None:
        if progress is not None:
            progress(p.tokens, p.total_tokens)
        if watch is not None:
            watch(p)

    parts = [part for layer in model.layers if (part := part_of(layer)) is not None]
    before = [_mark(c) for c in cache]
    try:
        if parts and ids.size > 1:
            parts[0].shared.listener = _Run(ids.size, len(parts), tell)
        model(ids[None], cache=cache)  # what it returns is lazy and never evaluated
        mx.eval([c.state for c in cache])
    except BaseException:
        for c, mark in zip(cache, before, strict=True):
            _put_back(c, mark)
        raise
    finally:
        if parts:
            parts[0].shared.listener = None
        mx.clear_cache()


def check_context(model: nn.Module, n: int, cache: list[Any]) -> None:
    """Refuse a prompt that the model cannot hold.

    Args:
        model: with mlx-lm's `args`, its own or its language model's.
        n: tokens to come.
        cache: holding the tokens before them.

    Raises:
        ContextFull: with the numbers.
    """
    args = getattr(getattr(model, "language_model", model), "args", None)
    limit = getattr(args, "max_position_embeddings", None)
    held = max((c.offset for c in cache if isinstance(getattr(c, "offset", None), int)), default=0)
    if isinstance(limit, int) and held + n > limit:
        raise ContextFull(
            f"the prompt has {held + n} tokens ({held} of them cached), the model's context holds {limit}. "
            "Shorten the prompt, or start a new conversation.",
            prompt_tokens=held + n,
            reply_tokens=0,
            context_tokens=limit,
        )


@dataclass(slots=True)
class _Run:
    """The prompt that is running through the layers, told of their progress."""

    n_tokens: int
    n_layers: int
    tell: Callable[[PrefillProgress], None]
    started: float = field(default_factory=time.perf_counter)
    layers: int = 0
    only_caches: bool = True

    def layer_done(self) -> None:
        self.layers += 1
        self.tick(0.0)

    def tick(self, part: float) -> None:
        done = (self.layers + part) / self.n_layers
        seconds = time.perf_counter() - self.started
        left = seconds * (1 - done) / done if done else 0.0
        self.tell(PrefillProgress(int(done * self.n_tokens), self.n_tokens, self.layers, self.n_layers, seconds, left))


def _mark(cache: Any) -> Any:
    """What it takes to put a cache back. Nothing is copied: arrays are immutable, a key-value cache only grows."""
    if type(cache) in (KVCache, QuantizedKVCache):
        return cache.offset
    return (list(cache.cache), cache.left_padding, cache.lengths) if type(cache) is ArraysCache else None


def _put_back(cache: Any, mark: Any) -> None:
    if type(cache) in (KVCache, QuantizedKVCache):
        cache.offset = mark
        if mark == 0:
            cache.keys = cache.values = None
    elif type(cache) is ArraysCache:
        cache.cache, cache.left_padding, cache.lengths = mark
