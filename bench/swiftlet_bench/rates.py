"""Three rates of this machine that decide how fast a streamed model can be: weights through a matrix product, one host
read-back, and (from io.py) bytes from the disk.

Knows MLX; no model. Invariant: each is measured as the product uses it: one row times quantized weights, one small
evaluation that the host waits for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

WEIGHT_BYTES = 192 << 20  # more than any cache holds
_LEAST_BYTES = 2 << 20
_PIECE_BYTES = 16 << 20  # a few layers' worth: the product of one token is many such
SECONDS = 0.3  # of one pass
_WIDTH = 2048


@dataclass(frozen=True, slots=True)
class Rates:
    """Of this machine and backend. `weights` is bytes a second; `read_back` is seconds."""

    weights: float
    read_back: float


def measure(bits: int | None = 4, dtype: mx.Dtype = mx.bfloat16) -> Rates:
    """Measure both, in about a second, also where a product is slow."""
    rough = weight_rate(bits, dtype, _LEAST_BYTES)
    enough = min(WEIGHT_BYTES, max(_LEAST_BYTES, int(rough * SECONDS)))
    return Rates(weight_rate(bits, dtype, enough), read_back_seconds())


def weight_rate(bits: int | None = 4, dtype: mx.Dtype = mx.bfloat16, nbytes: int = WEIGHT_BYTES) -> float:
    """Bytes of weights a second in a product with one row: what decoding is bound by.

    Args:
        bits: Of quantized weights in groups of 64; None for plain ones.
        dtype: Of what is not quantized.
        nbytes: Of weights to go through.
    """
    piece = min(_PIECE_BYTES, nbytes)
    count = max(1, nbytes // piece)
    x = mx.ones((1, _WIDTH), dtype)
    products: list[Callable[[], mx.array]]
    if bits is None:
        plain = [mx.random.uniform(-1, 1, (piece // (_WIDTH * dtype.size), _WIDTH)).astype(dtype) for _ in range(count)]
        weights = list(plain)
        products = [partial(_plain, x, w) for w in plain]
    else:
        rows, weights, products = piece * 8 // (_WIDTH * bits), [], []
        for _ in range(count):
            packed = mx.random.randint(0, 2**31 - 1, (rows, _WIDTH * bits // 32)).astype(mx.uint32)
            scales = mx.full((rows, _WIDTH // 64), 0.01).astype(dtype)
            biases = mx.full((rows, _WIDTH // 64), -0.05).astype(dtype)
            weights += [packed, scales, biases]
            products.append(partial(_quantized, x, packed, scales, biases, bits))
    mx.eval(x, weights)

    def once() -> float:
        start = time.perf_counter()
        mx.eval([product() for product in products])
        return time.perf_counter() - start

    once()
    seconds = statistics.median(once() for _ in range(3))
    return sum(w.nbytes for w in weights) / seconds


def read_back_seconds(n: int = 50) -> float:
    """Seconds until the host has the result of a small product that nobody has asked for before."""
    w = mx.random.uniform(-1, 1, (256, 256))
    x = mx.ones((1, 256))
    mx.eval(w, x)
    times = []
    for _ in range(n):
        start = time.perf_counter()
        mx.argmax(x @ w).item()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _plain(x: mx.array, w: mx.array) -> mx.array:
    return x @ w.T


def _quantized(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=64, bits=bits)
