"""A whole prompt into the caches of a model, each routed expert read at most once, however long it is.

The layers do the work (layer_major.py); this is what is said and done around it: refuse what does not fit before
anything is read, tell how far it has come, and put the caches back when it is broken off. Knows models and caches;
knows nothing of experts. Invariant: after an exception every cache that can be put back holds what it held before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from .device import backend
from .errors import ContextFull, MemoryFull
from .layer_major import carries_the_past, layer_norm, part_of
from .memory import available_bytes
from .units import size

STEP_TOKENS = 2048  # a pass of a model that cannot take all tokens at once, as in mlx-lm
CUDA_CACHE_BYTES = 4 << 30


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
        model: what `swiftlet_mlx.load` has returned. A model with layers that are not layer-major is fed in mlx-lm's
            steps, and its experts are read once a step; so is one whose caches hold a window of the past.
        tokens: `[n]` token ids.
        cache: from `make_prompt_cache`, empty or holding the tokens before these.
        progress: called with (tokens done, tokens) after every chunk of tokens and every group of experts. It may
            raise, to stop: the exception passes through.
        watch: the same, with times and layers.

    Raises:
        ContextFull: the prompt is longer than the model's context, or (MemoryFull) than memory allows. Nothing has
            been read.
        ReadFailed: an expert could not be read.
    """
    ids = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
    n = ids.size
    if n == 0:
        return
    check_context(model, n, cache)
    check_memory(model, n)

    def tell(p: PrefillProgress) -> None:
        if progress is not None:
            progress(p.tokens, p.total_tokens)
        if watch is not None:
            watch(p)

    parts = [part for layer in model.layers if (part := part_of(layer)) is not None]
    # A layer that must see all its tokens at once would need memory for all of them.
    whole = len(parts) == len(model.layers) and all(map(carries_the_past, cache))
    step = n if whole else STEP_TOKENS
    before = [_mark(c) for c in cache]
    try:
        with _room_for_temporaries():
            for at in range(0, n, step):
                run = _Run(n, at, min(step, n - at), len(parts), tell)
                if whole and n > 1:
                    parts[0].shared.listener = run
                model(ids[None, at : at + step], cache=cache)  # what it returns is lazy and never evaluated
                mx.eval([c.state for c in cache])
                if not whole:
                    run.end()
    except BaseException:
        for c, mark in zip(cache, before, strict=True):
            _put_back(c, mark)
        raise
    finally:
        if parts:
            parts[0].shared.listener = None


@contextmanager
def _room_for_temporaries() -> Iterator[None]:
    """On CUDA let MLX keep what is freed meanwhile: giving it back to the driver after each group and asking for it
    again took a fifth of the time (H200, 4,096 tokens). Elsewhere the limit of the process stands."""
    before = mx.set_cache_limit(CUDA_CACHE_BYTES) if backend() == "cuda" else None
    try:
        yield
    finally:
        if before is not None:
            mx.set_cache_limit(before)
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


def check_memory(model: nn.Module, n: int) -> None:
    """Refuse a prompt whose key-value cache and hidden states would not fit.

    Args:
        model: whose layers `use_layer_major` has changed; of any other nothing is known and nothing refused.
        n: tokens to come.

    Raises:
        MemoryFull: with the numbers.
    """
    each, fixed = prefill_bytes(model)
    free = _free_bytes()
    if each and n * each + fixed > free:
        fits = max(0, (free - fixed) // each)
        raise MemoryFull(
            f"{n} tokens need {size(n * each + fixed)} for their key-value cache and hidden states, {size(free)} are "
            f"free, enough for {fits}. Shorten the prompt, or give less --cache-gb.",
            prompt_tokens=n,
            reply_tokens=0,
            context_tokens=fits,
        )


def prefill_bytes(model: nn.Module) -> tuple[int, int]:
    """What a prefill costs beside weights and slots.

    Returns:
        Bytes a token (key-value cache of all layers, hidden states of one), and bytes whatever the length.
    """
    parts = [(layer, part) for layer in model.layers if (part := part_of(layer)) is not None]
    norms = [norm for layer, _ in parts if (norm := layer_norm(layer)) is not None]
    if not norms:
        return 0, 0
    item, width = norms[0].itemsize, norms[0].size
    kv = sum(
        module[name].weight.shape[0] * item
        for layer, _ in parts
        for _, module in layer.named_modules()
        for name in ("k_proj", "v_proj")
        if name in module
    )
    # x, its residual, the shared expert's part, the experts' input, what is returned: five, and a float32 sum
    return kv + width * (5 * item + 4), parts[0][1].shared.pair_bytes


def _free_bytes() -> int:
    limit = mx.device_info().get("max_recommended_working_set_size")  # what a Mac lets the GPU have
    free = available_bytes()
    return min(free, limit - mx.get_active_memory()) if isinstance(limit, int) else free


@dataclass(slots=True)
class _Run:
    """The stretch of the prompt that is running through the layers, told of their progress."""

    n_tokens: int
    first: int
    count: int
    n_layers: int
    tell: Callable[[PrefillProgress], None]
    started: float = field(default_factory=time.perf_counter)
    layers: int = 0
    only_caches: bool = True

    def layer_done(self) -> None:
        self.layers += 1
        self.tick(0.0)

    def tick(self, part: float) -> None:
        self._tell((self.layers + part) / self.n_layers)

    def end(self) -> None:
        """The stretch is done, by layers that do not tell."""
        self._tell(1.0)

    def _tell(self, part: float) -> None:
        tokens = self.first + int(part * self.count)
        seconds = time.perf_counter() - self.started
        left = seconds * (self.n_tokens - tokens) / (tokens - self.first) if tokens > self.first else 0.0
        self.tell(PrefillProgress(tokens, self.n_tokens, self.layers, self.n_layers, seconds, left))


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
