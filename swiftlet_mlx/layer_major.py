"""A whole stretch of tokens through one decoder layer, each routed expert of it read at most once.

`use_layer_major` gives the decoder layers of a streamed model a class whose forward pass takes many tokens so:

1. Attention, DeltaNet, router, shared expert: mlx-lm's own code, in chunks of tokens, so that memory does not grow
   with the prompt. Where that code calls its routed experts it gets a promise (promise.py) and goes on.
2. The (token, choice) pairs of all chunks are computed group of experts by group (expert_pass.py).
3. What the layer did with the promise is done to the results (results.py).

Every call of the model with many tokens is then layer-major, whoever makes it. Which layers can run so is found by
trying them on lazy arrays: one that does something unforeseen with its experts keeps mlx-lm's path, streamed by
moe.py. Decoding (one token) is mlx-lm's path, too.

Knows layers, masks and caches; nothing of files, slots or budgets. Invariant: when a layer returns, everything it was
asked to compute is being evaluated, and nothing that is not done refers to a slot.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache
from numpy.typing import NDArray

from .device import backend
from .expert_pass import ExpertPass
from .moe import Streamed
from .promise import Promise
from .results import Pairs, Results, Sums
from .routes import Layout, Routes

# Tokens of attention and DeltaNet in one go. On the CPU mlx-lm's DeltaNet loop keeps the state of every token until the
# graph has run: 2 MB a token in a 35B model.
CHUNK_TOKENS, CHUNK_TOKENS_CPU = 1024, 256
# Results kept one by one up to here. 128 MiB: 4,096 tokens of 8 choices, hidden size 2,048, bfloat16. A CUDA device has
# more to give, and adding results up as they arrive took a fifth of the time for 16,384 tokens (H200, 2026-12).
PAIR_BYTES, PAIR_BYTES_CUDA = 128 << 20, 1 << 30


class Experts(Protocol):
    """The routed experts of one layer, for one pass over them."""

    @property
    def n_experts(self) -> int: ...

    def read_back(self, indices: mx.array) -> NDArray[np.uint32]:
        """Host synchronisation: the router's choice."""

    def arrange(self, routes: Routes) -> Layout:
        """Decide in which order the experts of N tokens are computed, and so where their pairs lie."""

    def compute(self, x: mx.array) -> Iterator[mx.array]:
        """Compute every row of the layout once, in order.

        Args:
            x: `[N, H]`.

        Yields:
            a lazy `[P, H]`, the results of the next P rows. When the generator is resumed, they have been put to use
            in a graph that is being evaluated.
        """

    def close(self) -> None:
        """End reads and evaluations under way; called however the pass ended."""


ExpertsOf = Callable[[Any], Callable[[], Experts] | None]


class Listener(Protocol):
    """Whoever runs a prompt through the model. What it raises ends the run."""

    @property
    def only_caches(self) -> bool:
        """True if nothing but the caches is wanted of this run: the last layer's experts are then left out."""

    def tick(self, part: float) -> None:
        """This part of the present layer is done."""

    def layer_done(self) -> None:
        """The present layer has returned; the next one begins."""


@dataclass(slots=True)
class LayerMajor:
    """What the layers of one model share.

    Args:
        chunk_tokens: tokens of attention and DeltaNet in one go.
        chunks_ahead: chunks that may be computing while the graph of the next is built.
        pair_bytes: bound on results that are kept one by one and added up by the layer's own code. Those of more
            tokens are added in float32 as they arrive.
        listener: set while a prompt runs.
    """

    chunk_tokens: int = field(default_factory=lambda: CHUNK_TOKENS_CPU if backend() == "cpu" else CHUNK_TOKENS)
    chunks_ahead: int = field(default_factory=lambda: 0 if backend() == "cpu" else 1)
    pair_bytes: int = field(default_factory=lambda: PAIR_BYTES_CUDA if backend() == "cuda" else PAIR_BYTES)
    listener: Listener | None = None


@dataclass(slots=True)
class LayerPart:
    """What one decoder layer needs for its pass; kept on the layer as a plain attribute."""

    shared: LayerMajor
    last: bool
    parent: Any = None
    """The module whose item `name` is the routed experts; None in a layer without any."""
    name: str = ""
    begin: Callable[[], Experts] | None = None
    replaced: Any = None
    """The experts while something else stands in their place."""

    def restore(self) -> None:
        """Put the experts back. May be said twice, where Ctrl-C came between."""
        if self.replaced is not None:
            self.parent[self.name] = self.replaced
            self.replaced = None


# ---- giving the layers of a model their class -------------------------------------------------------------------


def streamed_experts(module: Any) -> Callable[[], Experts] | None:
    """How to begin a pass over a module's experts, or None if it has none on disk."""
    return functools.partial(ExpertPass, module) if isinstance(module, Streamed) else None


def use_layer_major(
    model: nn.Module, settings: LayerMajor | None = None, experts_of: ExpertsOf = streamed_experts
) -> int:
    """Let the decoder layers of this model, and of no other, take many tokens layer by layer.

    Args:
        model: a model whose routed experts are streamed.
        settings: what the layers are to share; None for the defaults.
        experts_of: tells a module with routed experts, and how to begin a pass over them, from any other.

    Returns:
        How many layers take part. A layer keeps mlx-lm's path if it holds more than one set of experts, if its
        forward pass has no `mask` and `cache`, or if it does with its experts' output what cannot be replayed.
    """
    shared = settings or LayerMajor()
    layers = list(model.layers)
    caches = list(model.make_cache()) if hasattr(model, "make_cache") else [KVCache() for _ in layers]
    if len(caches) != len(layers):  # layers that share a cache or have none: not told apart here
        return 0
    n = 0
    for layer, cache in zip(layers, caches, strict=True):
        if isinstance(layer, nn.Module) and part_of(layer) is None:
            part = _part(layer, shared, experts_of, last=layer is layers[-1])
            if part is not None and _works(layer, part, cache):
                layer._layer_major = part
                layer.__class__ = _layer_major_class(cast("Hashable", type(layer)))
                n += 1
    return n


def use_stock_layers(model: nn.Module) -> int:
    """Undo `use_layer_major`.

    Args:
        model: the same model.

    Returns:
        How many layers went back to mlx-lm's own class.
    """
    layers = [layer for layer in model.layers if part_of(layer) is not None]
    for layer in layers:
        layer.__class__ = vars(type(layer))["_stock_layer_class"]
        del layer._layer_major
    return len(layers)


def layer_norm(layer: Any) -> mx.array | None:
    """The weight of a norm of a decoder layer, as wide as the layer's input; None if it has no such child."""
    modules = [child for child in layer.children().values() if isinstance(child, nn.Module)]  # some are lists of them
    weights = [w for module in modules if isinstance(w := module.get("weight"), mx.array)]
    return next((w for w in weights if w.ndim == 1), None)


def part_of(layer: Any) -> LayerPart | None:
    """What `use_layer_major` has given a layer, or None."""
    return cast("LayerPart", layer._layer_major) if "_stock_layer_class" in vars(type(layer)) else None


def _part(layer: nn.Module, shared: LayerMajor, experts_of: ExpertsOf, *, last: bool) -> LayerPart | None:
    if not {"mask", "cache"} <= inspect.signature(type(layer).__call__).parameters.keys():
        return None
    found = [
        LayerPart(shared, last, parent, name, begin)
        for _, parent in layer.named_modules()
        for name, child in parent.children().items()
        if (begin := experts_of(child)) is not None
    ]
    return None if len(found) > 1 else found[0] if found else LayerPart(shared, last)


def _works(layer: nn.Module, part: LayerPart, cache: Any) -> bool:
    """Run the layer on two lazy tokens, evaluating nothing, and see whether a promise comes out at its end."""
    if part.begin is None:
        return True
    norm = layer_norm(layer)
    if norm is None:
        return False
    try:
        with _promised(part) as calls:
            mask = None if isinstance(cache, ArraysCache) else "causal"
            out = layer(mx.zeros((1, 2, norm.size)), mask=mask, cache=cache)
    except Exception:  # whatever an unforeseen layer raises over a promise, the answer is no
        return False
    return len(calls) == 1 and isinstance(out, Promise)


@functools.cache
def _layer_major_class(stock: type[nn.Module]) -> type[nn.Module]:
    signature = inspect.signature(stock.__call__)
    first = list(signature.parameters)[1]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = self._layer_major
        if part.replaced is not None:  # Ctrl-C came while the experts were put back
            part.restore()
        given = signature.bind(self, *args, **kwargs)
        x = given.arguments[first]
        if x.shape[1] == 1:  # decoding
            return stock.__call__(self, *args, **kwargs)

        def call(chunk: mx.array, mask: Any) -> Any:
            given.arguments[first] = chunk
            if "mask" in given.arguments:
                given.arguments["mask"] = mask
            return stock.__call__(*given.args, **given.kwargs)

        return run_layer(part, call, x, given.arguments.get("mask"), given.arguments.get("cache"))

    body = {"__call__": forward, "__module__": stock.__module__, "_stock_layer_class": stock}
    return type(stock.__name__, (stock,), body)


# ---- one layer, many tokens -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """One call of the routed experts, answered with a promise."""

    x: mx.array
    indices: mx.array


@contextmanager
def _promised(part: LayerPart) -> Iterator[list[_Call]]:
    """Let the layer's experts answer with promises; gives the calls that were made."""
    calls: list[_Call] = []
    if part.begin is None:
        yield calls
        return

    def answer(x: mx.array, indices: mx.array) -> mx.array:
        calls.append(_Call(x, indices))
        return Promise.of((*indices.shape, x.shape[-1]), x.dtype)

    part.replaced = part.parent[part.name]
    part.parent[part.name] = answer
    try:
        yield calls
    finally:
        part.restore()


def run_layer(part: LayerPart, call: Callable[[mx.array, Any], Any], x: mx.array, mask: Any, cache: Any) -> mx.array:
    """One decoder layer over many tokens.

    Args:
        part: the layer's own.
        call: the stock forward pass, of a chunk of x and the mask for it.
        x: `[B, T, H]`.
        mask: as the model gives it for all T tokens.
        cache: the layer's, or None.

    Returns:
        `[B, T, H]`, evaluated.
    """
    listener, T = part.shared.listener, x.shape[1]
    outs: list[mx.array] = []
    calls: list[_Call] = []
    begun: deque[list[mx.array]] = deque()
    for a, b in _spans(T, part.shared.chunk_tokens if _divisible(mask, cache) else T):
        with _promised(part) as made:
            out = call(x[:, a:b], mask)
        wanted = [*out.operands, made[0].x, made[0].indices] if isinstance(out, Promise) else [out]
        begun.append(wanted)
        mx.async_eval(wanted, cache.state if cache is not None else [])  # type: ignore[no-untyped-call]
        while len(begun) > part.shared.chunks_ahead:
            mx.eval(begun.popleft())  # host sync: ends the graph behind a chunk
        outs.append(out)
        calls += made
        if listener is not None:
            listener.tick(0.5 * b / T)

    if listener is not None and listener.only_caches and part.last:
        outs = [x]  # the caches are filled, and nobody will look at this
    elif any(isinstance(out, Promise) for out in outs):
        if not all(isinstance(out, Promise) for out in outs) or len(calls) != len(outs):
            raise RuntimeError(f"{type(part.parent).__name__} uses its experts in some chunks and not in others")
        outs = _run_experts(part, cast("list[Promise]", outs), calls)
    if listener is not None:
        listener.layer_done()
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=1)


def _run_experts(part: LayerPart, promises: list[Promise], calls: list[_Call]) -> list[mx.array]:
    """What the layer returns for each chunk, its routed experts having been computed group by group."""
    assert part.begin is not None  # only a layer with experts makes promises
    experts, listener = part.begin(), part.shared.listener
    k, width, dtype = calls[0].indices.shape[-1], calls[0].x.shape[-1], calls[0].x.dtype
    shapes = [c.indices.shape for c in calls]
    try:
        chosen = experts.read_back(_joined([c.indices.reshape(-1, k) for c in calls]))  # host sync: [N, k]
        layout = experts.arrange(Routes(chosen, experts.n_experts))
        rows = _joined([c.x.reshape(-1, width) for c in calls])  # [N, H]
        mx.async_eval(rows)  # type: ignore[no-untyped-call]
        calls.clear()

        weights = [w.reshape(-1, k) for p in promises if (w := p.weights) is not None]
        results: Results
        if layout.n_rows * width * dtype.size <= part.shared.pair_bytes or len(weights) < len(promises):
            results = Pairs(layout, width, dtype)
        else:
            results = Sums(layout, _joined(weights), width)

        done = 0
        for y in experts.compute(rows):
            results.put(y)
            done += y.shape[0]
            if listener is not None:
                listener.tick(0.5 + 0.5 * done / layout.n_rows)
        if done != layout.n_rows:
            raise RuntimeError(f"{done} of {layout.n_rows} results came from the experts of a layer")
    finally:
        experts.close()

    outs, first = [], 0
    for promise, shape in zip(promises, shapes, strict=True):
        outs.append(results.take(promise, first, shape))
        mx.async_eval(outs[-1])  # type: ignore[no-untyped-call]
        first += int(np.prod(shape[:-1]))
    return outs


def _joined(pieces: list[mx.array]) -> mx.array:
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


def carries_the_past(cache: Any) -> bool:
    """Whether a layer with this cache may see its tokens in chunks: the cache holds all that came before."""
    return type(cache) in (KVCache, QuantizedKVCache, ArraysCache)


def _divisible(mask: Any, cache: Any) -> bool:
    """Whether a layer may see these tokens in chunks: its mask, too, must be the same for any number of them."""
    plain = mask is None if type(cache) is ArraysCache else isinstance(mask, str) and mask == "causal"
    return plain and carries_the_past(cache)


def _spans(n: int, size: int) -> list[tuple[int, int]]:
    """Cut n tokens into chunks. A last one of a single token joins the one before it: mlx-lm masks one token
    otherwise than many."""
    cuts = list(range(0, n, size))
    if len(cuts) > 1 and n - cuts[-1] == 1:
        cuts.pop()
    return list(zip(cuts, [*cuts[1:], n], strict=True))
