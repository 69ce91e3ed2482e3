"""The gated delta rule over many tokens, for backends where mlx-lm steps through a prompt token by token.

Knows one recurrence and how to give a model's layers a faster form of it. Does not know streaming, caches or
prompts.

Invariant: the specification is `mlx_lm.models.gated_delta.gated_delta_ops`; the fast forms differ from it by the
rounding of float32 only, and leave it what they gain nothing for (few tokens, vector gates).

Who gets what. On Metal mlx-lm has a kernel, and keeps it: the fast form stands where mlx-lm calls its op loop, so
mlx-lm's own dispatch decides. On CUDA it is a kernel, too (delta_kernel.py), and on by default. Shapes that kernel does
not take go in chunks (H200, 32 heads of 128, 2,048 tokens: 7 ms, the loop 160 ms; the outputs differ by 6e-4 of the
largest, for CUDA multiplies float32 with 11 bits). On the CPU, in chunks, it is off by default: another order of sums
means logits that are no longer bit-equal to stock mlx-lm, and that promise is worth more there than the gain. Measured
on 2 cores for 512 tokens of those heads: loop 2.1 s a layer, chunks 1.0 s; 30 such layers save half a minute of a
prompt whose matrix products, at the 2.2 GFLOP/s of MLX's CPU build, take more than twenty minutes with 3 billion active
parameters.

How it is put to work. `use_chunked_delta(model)` gives the model's own delta layers a class whose forward
pass is mlx-lm's function with one name bound to the fast form. No module of mlx-lm is changed: a stock
model in the same process, on whatever thread, stays stock. `use_stock_delta(model)` takes it back.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from ._compat import gated_delta, rebound
from .delta_kernel import fits, gated_delta_kernel
from .device import backend

CHUNK = 64  # tokens; 32 and 128 were slower on the CPU, and CUDA's matrix tiles are 64 wide (2026-12)
MIN_TOKENS = 32  # below this the loop is about as fast (a chunk costs the same however few tokens it holds)

_UPDATE = "gated_delta_update"


def gated_delta_prompt(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Run the gated delta rule over T tokens as fast as this backend can. See `gated_delta_chunked`."""
    if backend() != "cuda" or g.ndim == 4 or q.shape[1] < MIN_TOKENS or not fits(q, v):
        return gated_delta_chunked(q, k, v, g, beta, state, mask)
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[-2:], q.shape[-1]), mx.float32)
    return gated_delta_kernel(q, k, v, *_masked(g, beta, mask), state)


def gated_delta_chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Run the gated delta rule over T tokens, CHUNK of them at a time.

    With S the state, every token does S <- g S; d = beta (v - S k); S <- S + d k^T; y = S q. Inside a chunk
    the d of all tokens solve one unit lower-triangular system (the UT transform of Yang et al.,
    "Parallelizing linear transformers with the delta rule over sequence length", 2024, and "Gated delta
    networks", 2024).

    Args:
        q, k: `[B, T, Hk, Dk]`, keys normalised.
        v: `[B, T, Hv, Dv]`; Hv is a multiple of Hk.
        g: decay in [0, 1], `[B, T, Hv]`; a vector gate `[B, T, Hv, Dk]` goes to mlx-lm's loop.
        beta: `[B, T, Hv]`, in [0, 2].
        state: `[B, Hv, Dv, Dk]`, or None for zeros.
        mask: `[B, T]`, False where a token leaves the state alone. What y holds there is not defined
            (mlx-lm's loop and its kernel differ); it is finite.

    Returns:
        y `[B, T, Hv, Dv]` in q's dtype, and the float32 state after the last token.
    """
    if g.ndim == 4 or q.shape[1] < MIN_TOKENS:
        return cast("tuple[mx.array, mx.array]", gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask))

    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[-2:]
    R = Hv // Hk
    n = -(-T // CHUNK)
    g, beta = _masked(g, beta, mask)

    def chunks(x: mx.array, heads: int, fill: float = 0) -> mx.array:
        """[B, T, heads (, D)] -> [n, B, Hk, heads / Hk, CHUNK (, D)] in float32, the tail padded."""
        rest = x.shape[3:]
        x = mx.pad(x.astype(mx.float32), [(0, 0), (0, n * CHUNK - T)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        x = x.reshape(B, n, CHUNK, Hk, heads // Hk, *rest)
        return x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim))

    qc, kc, vc = chunks(q, Hk), chunks(k, Hk), chunks(v, Hv)
    gc, bc = chunks(g, Hv, fill=1), chunks(beta, Hv)[..., None]

    row, col = mx.arange(CHUNK)[:, None], mx.arange(CHUNK)[None]
    # decay[i, j] = g[j+1] ... g[i], what is left at token i of what token j wrote. Products of numbers <=
    # 1, as the loop forms them: a difference of summed logarithms loses digits after a strong decay and
    # makes NaN of g = 0.
    decay = mx.cumprod(mx.where(row > col, gc[..., :, None], 1), axis=-2)
    decay = mx.where(row >= col, decay, 0)  # [n, B, Hk, R, CHUNK, CHUNK]
    since_start = mx.cumprod(gc, axis=-1)[..., None]  # [n, B, Hk, R, CHUNK, 1]

    k_t = kc.swapaxes(-1, -2)
    solve = _unit_lower_inverse(mx.where(row > col, (kc @ k_t) * decay, 0) * bc)
    from_values = solve @ (bc * vc)  # d, were the state zero: [n, B, Hk, R, CHUNK, Dv]
    from_state = solve @ (bc * since_start * kc)  # what the state takes off it: [n, B, Hk, R, CHUNK, Dk]
    within = (qc @ k_t) * decay
    q_state = qc * since_start
    k_left = kc * decay[..., -1, :, None]  # a key as it is left at the end of its chunk
    g_chunk = since_start[..., -1:, :]

    s = mx.zeros((B, Hv, Dv, Dk)) if state is None else state.astype(mx.float32)
    s = s.reshape(B, Hk, R, Dv, Dk)
    ys = []
    for c in range(n):
        s_t = s.swapaxes(-1, -2)
        d = from_values[c] - from_state[c] @ s_t
        ys.append((q_state[c] @ s_t + within[c] @ d).astype(q.dtype))
        s = s * g_chunk[c] + d.swapaxes(-1, -2) @ k_left[c]

    y = mx.stack(ys, axis=1).transpose(0, 1, 4, 2, 3, 5)  # [B, n, CHUNK, Hk, R, Dv]
    return y.reshape(B, n * CHUNK, Hv, Dv)[:, :T], s.reshape(B, Hv, Dv, Dk)


def _masked(g: mx.array, beta: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """A token that is masked keeps everything and adds nothing."""
    return (g, beta) if mask is None else (mx.where(mask[..., None], g, 1), mx.where(mask[..., None], beta, 0))


def _unit_lower_inverse(a: mx.array) -> mx.array:
    """(I + a)^-1 for strictly lower-triangular a, `[..., N, N]`, N a power of two.

    By halves, [[P, 0], [c, Q]]^-1 = [[P', 0], [-Q' c P', Q']]: log N levels, each two matrix products, on
    every backend (`mx.linalg` runs on the CPU alone). The product (I - a)(I + a^2)(I + a^4)... is as deep
    but squares a, whose powers reach 1e17 on a run of equal keys (one repeated token) and leave no digit of
    a result that is 0, 1 and -1.
    """
    n = a.shape[-1]
    if n == 2:
        return mx.eye(2) - a
    h = n // 2
    p, q = _unit_lower_inverse(mx.stack([a[..., :h, :h], a[..., h:, h:]]))
    below = -(q @ (a[..., h:, :h] @ p))
    top = mx.concatenate([p, mx.zeros_like(p)], axis=-1)
    return mx.concatenate([top, mx.concatenate([below, q], axis=-1)], axis=-2)


def chunked_by_default() -> bool:
    """Whether this backend runs the fast form unless told otherwise: CUDA does, Metal and CPU do not."""
    return backend() == "cuda"


def use_chunked_delta(model: nn.Module) -> int:
    """Let the gated delta layers of this model, and of no other, run the fast form where they would run the loop.

    Args:
        model: any mlx-lm model; layers whose forward pass calls `gated_delta_update` are found by that name.

    Returns:
        How many layers now run the fast form; 0 for a model without such layers, which is no error.
    """
    layers = [m for m in model.modules() if _calls_update(type(m))]
    for layer in layers:
        layer.__class__ = _chunked_class(cast("Hashable", type(layer)))
    return len(layers)


def use_stock_delta(model: nn.Module) -> int:
    """Undo `use_chunked_delta`.

    Args:
        model: the same model.

    Returns:
        How many layers went back to mlx-lm's own class.
    """
    layers = [m for m in model.modules() if "_stock_delta_class" in vars(type(m))]
    for layer in layers:
        layer.__class__ = vars(type(layer))["_stock_delta_class"]
    return len(layers)


def _calls_update(cls: type) -> bool:
    """Whether a class's own forward pass looks `gated_delta_update` up among its module's names."""
    code = getattr(cls.__dict__.get("__call__"), "__code__", None)
    return code is not None and _UPDATE in code.co_names and "_stock_delta_class" not in vars(cls)


@functools.cache
def _chunked_class(stock: type[nn.Module]) -> type[nn.Module]:
    update = rebound(gated_delta.gated_delta_update, gated_delta_ops=gated_delta_prompt)
    forward = rebound(stock.__call__, **{_UPDATE: update})
    body = {"__call__": forward, "__module__": stock.__module__, "_stock_delta_class": stock}
    return type(stock.__name__, (stock,), body)
