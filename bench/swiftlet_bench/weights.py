"""Random weights that behave: finite for thousands of tokens, varied greedy output, routers with favourites.

Knows tensors' names, shapes and bytes; no files, no model. How it works:
- Every embedding holds the same alternating pattern beside its noise. The router's rows point along or against that
  pattern, each expert by its own amount, so that some experts are liked always and some hardly ever, as in trained
  models; a few are liked by nearly every token. The output layer has equal weights in each pair of channels and so
  does not see the pattern: no token is favoured.
- What a layer adds to the residual stream is scaled so that all layers together add about three times the embedding.
Invariant: a tensor's bytes follow from (seed, name, shape, format) alone, and are made a few megabytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
BLOCK = 1 << 21  # elements made at a time

PATTERN = 0.577  # of the alternating pattern, against noise of 1: what an offset of a quarter of the levels gives
ROUTER_NOISE = 1.3  # standard deviation of a router's logits over tokens
ROUTER_BIAS = 0.65  # of its fixed preferences, against that noise: the busiest quarter then gets 65 to 80 % of picks
LOUD_BIAS = 2.3  # of experts that nearly every token takes; there is one for every four choices
GROWTH = 3.0  # variance that all layers together add to the residual stream, against the embedding's noise of 1


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored: `bits` 4 or 8 in groups, or None for plain numbers; `tag` is the dtype of what is not
    quantized, as safetensors writes it: BF16, F16 or F32."""

    bits: int | None
    group_size: int
    tag: str

    @property
    def levels(self) -> int:
        return 1 << (self.bits or 0)


def generator(seed: int, *what: object) -> np.random.Generator:
    """A stream of numbers of its own for every purpose."""
    return np.random.Generator(np.random.SFC64([seed, crc32(repr(what).encode())]))


def as_tag(values: Floats, tag: str) -> NDArray[np.uint8]:
    """Numbers as bytes of a safetensors dtype. BF16 is rounded to nearest even, NumPy having no such type."""
    if tag == "F32":
        return values.astype(np.float32, copy=False).reshape(-1).view(np.uint8)
    if tag == "F16":
        return values.astype(np.float16).reshape(-1).view(np.uint8)
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)


def uniform(rng: np.random.Generator, n: int, deviation: float) -> Floats:
    """`n` numbers of mean 0; three times as fast to make as normal ones, and as good for this."""
    values = rng.random(n, np.float32)
    values -= np.float32(0.5)
    values *= np.float32(deviation * math.sqrt(12))
    return values


def plain(rng: np.random.Generator, rows: int, width: int, deviation: float, tag: str) -> Iterator[NDArray[np.uint8]]:
    """An unquantized matrix of noise."""
    for n in _blocks(rows, width):
        yield as_tag(uniform(rng, n * width, deviation), tag)


def embedding(rng: np.random.Generator, rows: int, width: int, tag: str) -> Iterator[NDArray[np.uint8]]:
    """Noise of deviation 1 on the alternating pattern."""
    for n in _blocks(rows, width):
        values = uniform(rng, n * width, 1.0)
        values[0::2] += np.float32(PATTERN)
        values[1::2] -= np.float32(PATTERN)
        yield as_tag(values, tag)


def output_layer(rng: np.random.Generator, rows: int, width: int, tag: str) -> Iterator[NDArray[np.uint8]]:
    """Noise that is equal in channels 2i and 2i + 1."""
    for n in _blocks(rows, width):
        yield as_tag(np.repeat(uniform(rng, n * width // 2, width**-0.5), 2), tag)


def quantized(
    rng: np.random.Generator, rows: int, width: int, bits: int, kind: str = "plain"
) -> Iterator[NDArray[np.uint8]]:
    """The packed integers of a matrix: noise over all levels, or as `embedding` or `output_layer` need it."""
    lanes = 8 // bits
    for n in _blocks(rows, width):
        raw = rng.integers(0, 1 << 64, n * width // lanes // 8, np.uint64).view(np.uint8)
        if kind == "plain":
            yield raw
        elif kind == "output":  # both of a pair alike
            yield ((raw & 0x0F) * 0x11).astype(np.uint8) if bits == 4 else np.repeat(raw[::2], 2)
        elif bits == 4:  # the low half of a byte is the even channel; raise it by a quarter of the levels
            low, high = (raw & 0x0F).astype(np.uint16), (raw >> 4).astype(np.uint16)
            yield ((low * 12 >> 4) + 4 + ((high * 12 >> 4) << 4)).astype(np.uint8)
        else:
            values = raw.astype(np.uint16) * 192 >> 8
            values[0::2] += 64
            yield values.astype(np.uint8)


def scales(
    rng: np.random.Generator, n: int, deviation: float, levels: int, kind: str = "plain"
) -> tuple[Floats, Floats]:
    """Scales and biases of `n` groups, so that what `quantized` made has this deviation and mean 0."""
    share = 0.75 if kind == "embedding" else 1.0
    nominal = deviation * math.sqrt(12) / (levels * share)
    middle = levels / 8 + (0.75 * levels - 1) / 2 if kind == "embedding" else (levels - 1) / 2
    found = nominal * (0.8 + 0.4 * rng.random(n, np.float32)) if kind == "plain" else np.full(n, nominal, np.float32)
    found = found.astype(np.float32)
    return found, (-found * np.float32(middle)).astype(np.float32)


def router(rng: np.random.Generator, experts: int, hidden: int, top_k: int, layer: int, layers: int) -> Floats:
    """A router's weights `[experts, hidden]` for inputs that `embedding` and the layers before have made."""
    variance = 1 + PATTERN**2 + GROWTH * (2 * layer + 1) / (2 * layers)  # of the residual stream, about
    seen = PATTERN / math.sqrt(variance)  # how much of the pattern is left after the norm
    bias = ROUTER_BIAS * rng.standard_normal(experts).astype(np.float32)
    loud = rng.permutation(experts)[: max(1, top_k // 4)]
    bias[loud] = LOUD_BIAS
    weights = uniform(rng, experts * hidden, ROUTER_NOISE * hidden**-0.5).reshape(experts, hidden)
    pattern = np.where(np.arange(hidden) % 2 == 0, 1, -1).astype(np.float32)
    weights -= np.outer(weights @ pattern / hidden, pattern)  # the noise part does not see the pattern
    weights += np.outer(bias * ROUTER_NOISE / (seen * hidden), pattern)
    return weights.astype(np.float32)


def write_gain(module: str, layers: int, top_k: int) -> float:
    """How much larger than 1/sqrt(width) the weights are that write to the residual stream.

    Two such steps a layer share `GROWTH`; the divisor is what reaches the module when its input has deviation 1.
    """
    each = math.sqrt(GROWTH / (2 * layers))
    if module.endswith("out_proj"):
        return each / 0.35
    if module.endswith("o_proj"):
        return each / 0.3
    if "shared_expert" in module:
        return each / 0.5
    return each / 0.5 * math.sqrt(top_k) / 1.5


def _blocks(rows: int, width: int) -> Iterator[int]:
    """Numbers of rows to make at a time."""
    most = max(1, BLOCK // width)
    for at in range(0, rows, most):
        yield min(most, rows - at)
