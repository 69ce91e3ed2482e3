"""The streamed expert layer: stock mlx-lm arithmetic on slots instead of experts.

`stream` turns a stock `SwitchGLU` or `SwitchMLP` into a subclass of itself whose projections hold slot arrays. Its
`__call__` reads the router's choice back, makes those experts resident, and hands slot numbers to the stock
`__call__`: every product, activation and sort is mlx-lm's own. Knows slots and modules; knows nothing of files.
Invariant: the result equals the stock layer's, whatever the pool size; experts that do not fit together are computed
in waves, each pair by the same kernel on the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from ._compat import QuantizedSwitchLinear, SwitchLinear, infer_quant_config
from .choice import Guess
from .errors import StreamingUnsupported
from .pools import Pools
from .slots import EMPTY, SlotPool

FEW = 256  # indices of a decode step, of one sequence or a batch: handled as a list, by far cheaper than np.unique
Early = tuple[list[int], mx.array]  # positions of a token's experts, and their outputs under way


class Streamed:
    """Mixed in before a stock switch layer. Its attributes are plain ones, outside `parameters()`."""

    pools: Pools
    pool: SlotPool
    layer: int
    beside: Ahead | None = None
    following: Router | None = None

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """The routed experts' outputs.

        Args:
            x: `[..., hidden]` tokens.
            indices: `[..., k]` experts of each token.

        Returns:
            `[..., k, hidden]`, unweighted, in the order of `indices`.
        """
        pools, pool = self.pools, self.pool
        if self.layer == pools.first:
            pools.before_step()
        if pool.complete and pools.recorder is None:  # expert e is in slot e: nothing to look up, no read-back
            return self._stock(x, indices)
        if indices.size > FEW:
            return self._many(x, indices)
        guess = self._guess(x) if pools.looking_ahead else None
        if pools.may_choose_later(pool, indices):
            y = self._stock(x, pools.choose_later(pool, indices, guess))
            pools.hold(y, pool)
            return y
        experts = pools.choice(pool, indices, guess)  # host synchronisation
        needed = pools.distinct(pool, experts)
        if len(needed) > pool.n_slots:
            return self._in_waves(x, np.array(experts, np.uint32).reshape(indices.shape), needed)
        early = None
        claimed = pools.begin(pool, needed)
        if claimed is not None:  # misses are being read
            if self.beside is not None:
                self.beside.start(x)  # the shared expert computes meanwhile
            early = self._begin_hits(x, indices, experts, claimed)
            if pools.may_wait_later(indices):
                pools.hand_over()
            else:  # else the graph of what follows is built meanwhile
                pools.wait()
                claimed = None
        if early is None:
            y = self._stock(x, pool.lookup_few(experts, indices.shape, claimed))
        else:
            y = self._joined(x, indices, experts, early, claimed)
        pools.hold(y, pool)
        return y

    def _begin_hits(
        self, x: mx.array, indices: mx.array, experts: list[int], claimed: Mapping[int, int]
    ) -> Early | None:
        """Let the experts of one token that are there compute while the others are read."""
        here = [n for n, e in enumerate(experts) if e not in claimed]
        if not here or indices.size != indices.shape[-1] or not self.pools.waits_long:
            return None
        y = self._stock(x, self.pool.lookup_few([experts[n] for n in here], (*indices.shape[:-1], len(here))))
        mx.async_eval(y)  # type: ignore[no-untyped-call]
        return here, y

    def _joined(
        self, x: mx.array, indices: mx.array, experts: list[int], early: Early, claimed: Mapping[int, int] | None
    ) -> mx.array:
        """The outputs of one token's experts, of which some were begun early, in the order of `indices`."""
        here, hits = early
        rest = [n for n in range(len(experts)) if n not in here]
        slots = self.pool.lookup_few([experts[n] for n in rest], (*indices.shape[:-1], len(rest)), claimed)
        y = mx.concatenate([hits, self._stock(x, slots)], axis=-2)  # [..., k, hidden], hits first
        order = sorted(range(len(experts)), key=(here + rest).__getitem__)
        return mx.take(y, mx.array(order, mx.uint32), axis=-2)

    def _many(self, x: mx.array, indices: mx.array) -> mx.array:
        """More tokens than a decode step has."""
        experts = self.pools.read_back(indices)  # host synchronisation
        needed = [int(e) for e in np.unique(experts)]
        if len(needed) > self.pool.n_slots:
            return self._in_waves(x, experts, needed)
        self.pools.load(self.layer, needed)
        y = self._stock(x, self.pool.lookup(experts))
        self.pools.hold(y, self.pool)
        return y

    def _in_waves(self, x: mx.array, experts: NDArray[np.uint32], needed: list[int]) -> mx.array:
        """More distinct experts than slots: residents first, then the others in file order, `n_slots` at a time."""
        pool = self.pool
        k = experts.shape[-1]
        tokens = x.reshape(-1, x.shape[-1])  # [n, hidden]
        pairs = experts.reshape(-1)  # [n * k], pair p belongs to token p // k
        needed.sort(key=lambda e: (pool.slots[e] == EMPTY, e))
        rank = np.zeros(pool.table.expert_count, np.int64)
        rank[needed] = np.arange(len(needed))
        order = np.argsort(rank[pairs], kind="stable")  # pairs by wave, then by expert
        outputs, at = [], 0
        for first in range(0, len(needed), pool.n_slots):
            wave = needed[first : first + pool.n_slots]
            stop = at + int(np.isin(pairs, wave).sum())
            rows = order[at:stop]
            self.pools.load(self.layer, wave)
            y = self._stock(tokens[mx.array(rows // k)], pool.lookup(pairs[rows])[:, None])  # [rows, 1, hidden]
            mx.eval(y)  # host synchronisation: the next wave overwrites these slots
            outputs.append(y)
            at = stop
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        y = mx.concatenate(outputs)[mx.array(inverse)]
        return y.reshape(*experts.shape, y.shape[-1])

    def _guess(self, x: mx.array) -> Guess | None:
        """What the next streamed layer will probably choose for one token."""
        router = self.following
        if router is None or x.size != x.shape[-1] or self.pools.layers[router.layer].complete:
            return None
        experts = router.choice(x)
        return None if experts is None else Guess(router.layer, experts)

    def _stock(self, x: mx.array, indices: mx.array) -> mx.array:
        return super().__call__(x, indices)  # type: ignore[misc, no-any-return]


@dataclass(frozen=True, slots=True)
class Router:
    """The router of a streamed layer: a plain product, `block.gate`, whose largest outputs name its experts.

    Looked up at each use: mlx-lm puts another module there when it quantizes a model that is built already.
    """

    layer: int
    block: nn.Module
    top_k: int

    def choice(self, x: mx.array) -> mx.array | None:
        """The experts, `[..., top_k]`, lazily; None where this is no product, or one of another width than x has."""
        gate = self.block.get("gate")
        if not _is_product(gate) or _width(gate) != x.shape[-1]:
            return None
        return mx.argpartition(gate(x), kth=-self.top_k, axis=-1)[..., -self.top_k :]


def _is_product(gate: Any) -> bool:
    return type(gate) in (nn.Linear, nn.QuantizedLinear)


def _width(gate: Any) -> int:
    """Of what a product is given."""
    quantized = isinstance(gate, nn.QuantizedLinear)
    return int(gate.scales.shape[-1] * gate.group_size if quantized else gate.weight.shape[-1])


class Ahead:
    """Mixed in before a block's shared expert: it may be started before the block asks for it.

    The block's own code stays as it is; when it calls its shared expert with the very array it gave its routed
    experts, the answer is already on its way.
    """

    _started: tuple[mx.array, mx.array] | None = None

    def start(self, x: mx.array) -> None:
        """Begin to compute for `x`."""
        y = super().__call__(x)  # type: ignore[misc]
        mx.async_eval(y)  # type: ignore[no-untyped-call]
        object.__setattr__(self, "_started", (x, y))

    def __call__(self, x: mx.array) -> mx.array:
        started = self._started
        if started is not None:
            object.__setattr__(self, "_started", None)
            if started[0] is x:
                return started[1]
        return super().__call__(x)  # type: ignore[misc, no-any-return]


class _Projection:
    """A stock projection over slot arrays, hidden from the module tree by being a plain object."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return self.linear(x, indices, sorted_indices=sorted_indices)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.linear, name)


def stream(module: nn.Module, path: str, layer: int, pools: Pools) -> None:
    """Replace a stock switch layer's stacked weights by slots, in place.

    Args:
        module: A `SwitchGLU` or `SwitchMLP`, unquantized and not yet evaluated.
        path: Its path in the model, for messages.
        layer: Index of the model layer it belongs to.
        pools: The model's pools; `pools.layers[layer]` must exist.

    Raises:
        StreamingUnsupported: if its projections or their shapes are not those of the stored experts.
    """
    pool = pools.layers[layer]
    stored = {name.split(".")[0] for name in pool.arrays}
    own = {name for name, child in module.children().items() if isinstance(child, SwitchLinear)}
    if own != stored:
        raise StreamingUnsupported(
            f"{path}: the model's experts have {sorted(own)}, the stored ones {sorted(stored)}; "
            "this version of mlx-lm and this file do not belong together"
        )
    for name in sorted(own):
        linear = _linear(module[name], f"{path}.{name}", pool, name)
        del module[name]
        object.__setattr__(module, name, _Projection(linear))
    object.__setattr__(module, "pools", pools)
    object.__setattr__(module, "pool", pool)
    object.__setattr__(module, "layer", layer)
    stock = type(module)
    module.__class__ = type(f"Streamed{stock.__name__}", (Streamed, stock), {})


def _linear(stock: nn.Module, path: str, pool: SlotPool, name: str) -> nn.Module:
    """A stock (quantized) switch projection whose weights are the pool's arrays."""
    _, out_dims, in_dims = stock.weight.shape
    parts = _parts(pool, name)
    bias = "bias" in stock
    if bias != ("bias" in parts):
        raise StreamingUnsupported(f"{path}: the model has {'a' if bias else 'no'} bias, the stored experts differ")
    if "scales" in parts:
        try:
            width = infer_quant_config(path, stock, {f"{path}.{part}": a for part, a in parts.items()})
            # built for one expert and never evaluated: only its settings are kept
            linear = QuantizedSwitchLinear(in_dims, out_dims, 1, bias=False, **width)
        except (ValueError, ZeroDivisionError) as error:
            raise StreamingUnsupported(f"{path}: unknown quantization ({error})") from None
        needed = (out_dims, in_dims * width["bits"] // 32)
    else:
        linear = SwitchLinear(in_dims, out_dims, 1, bias=False)
        needed = (out_dims, in_dims)
    found = tuple(parts["weight"].shape[1:])
    if found != needed:
        raise StreamingUnsupported(f"{path}: an expert's weight is {list(found)}, the model needs {list(needed)}")
    pool.on_arrays(lambda pool: _bind(linear, _parts(pool, name)))
    return linear


def _parts(pool: SlotPool, name: str) -> dict[str, mx.array]:
    """The arrays of one projection: `weight`, `scales`, ..."""
    return {section.split(".")[1]: a for section, a in pool.arrays.items() if section.split(".")[0] == name}


def _bind(linear: nn.Module, parts: dict[str, mx.array]) -> None:
    for part in ("weight", "scales", "bias"):
        if part in parts:
            linear[part] = parts[part]
    if "scales" in parts:
        linear.biases = parts.get("biases")
        linear.global_scale = parts.get("global_scale")


def overlap_shared_experts(model: nn.Module) -> int:
    """Let the shared expert beside each streamed layer compute while that layer's misses are read.

    Args:
        model: whose switch layers `stream` has replaced.

    Returns:
        How many there are.
    """
    n = 0
    for _, block in model.named_modules():
        streamed = [(name, child) for name, child in block.children().items() if isinstance(child, Streamed)]
        for name in ("shared_expert", "shared_experts"):
            shared = block.get(name)
            if len(streamed) != 1 or not isinstance(shared, nn.Module) or isinstance(shared, Ahead):
                continue
            if _given_the_same(block, streamed[0][0], name):
                stock = type(shared)
                shared.__class__ = type(stock.__name__, (Ahead, stock), {"__module__": stock.__module__})
                object.__setattr__(streamed[0][1], "beside", shared)
                n += 1
    return n


def foresee(model: nn.Module, top_k: int) -> int:
    """Let each streamed layer apply the router of the next one to what its own experts are given: a guess of what that
    layer will choose, one layer early. Of models whose routers are plain products.

    Args:
        model: whose switch layers `stream` has replaced.
        top_k: experts a token uses in a layer, 0 if unknown.

    Returns:
        How many layers have a guess to make.
    """
    routers: dict[int, Router] = {}
    streamed: dict[int, Streamed] = {}
    for _, block in model.named_modules():
        for child in block.children().values():
            if isinstance(child, Streamed):
                streamed[child.layer] = child
                gate, count = block.get("gate"), child.pool.table.expert_count
                if _is_product(gate) and gate.weight.shape[0] == count and top_k:
                    routers[child.layer] = Router(child.layer, block, top_k)
    layers = sorted(streamed)
    found = 0
    for layer, after in pairwise(layers):
        if after in routers:
            object.__setattr__(streamed[layer], "following", routers[after])
            found += 1
    return found


def _given_the_same(block: nn.Module, routed: str, shared: str) -> bool:
    """Whether a block gives its shared expert, after its routed ones, the very array it gave those.

    Some do not: where experts work in a latent space, the shared one is given something else, of another width. Found
    by a call on a lazy token; nothing is evaluated.
    """
    children = {name: block[name] for name in (routed, shared)}
    given: list[tuple[str, mx.array]] = []

    def answer_routed(x: mx.array, indices: mx.array) -> mx.array:
        given.append((routed, x))
        return mx.zeros((*indices.shape, x.shape[-1]))

    def answer_shared(x: mx.array) -> mx.array:
        given.append((shared, x))
        return x

    try:
        block[routed], block[shared] = answer_routed, answer_shared
        arrays = cast("list[tuple[str, mx.array]]", tree_flatten(children[shared].parameters()))
        width = next(a for _, a in arrays if a.ndim == 2).shape[-1]
        block(mx.zeros((1, 1, width)))
    except Exception:  # whatever an unforeseen block raises here, the answer is no
        return False
    finally:
        for name, child in children.items():
            block[name] = child
    return [name for name, _ in given] == [routed, shared] and given[0][1] is given[1][1]
