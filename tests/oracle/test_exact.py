"""Streamed against stock mlx-lm: the same weights, the same process, the same numbers to the last bit.

Every comparison is on the CPU in float32, where the arithmetic is the same whatever the pool. What is compared and how
long is what README.md promises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx import memory
from swiftlet_mlx.checkpoint import open_checkpoint
from swiftlet_mlx.loader import load_streamed

PROMPT = [1, 5, 9, 42, 7, 99, 3, 17, 64, 2]
CASES = [
    ("qwen3_next", None),
    ("qwen3_next", 4),
    ("qwen3_5_moe", 8),
    ("qwen3_5_moe", "mixed"),
    ("qwen3_moe", 4),
]
POOLS = ["one slot a layer", "one token's experts", "half", "everything"]


def budget_gb(folder: Path, pool: str) -> float:
    """The `cache_gb` that gives the named pool."""
    checkpoint = open_checkpoint(folder)
    tables, top_k = checkpoint.tables, checkpoint.shape.top_k
    sizes = {
        "one slot a layer": memory.minimum_bytes(tables, top_k),
        "one token's experts": memory.cycle_bytes(tables, top_k),
        "half": checkpoint.expert_bytes // 2,
        "everything": checkpoint.expert_bytes,
    }
    return sizes[pool] / memory.GB


def greedy(model: Any, prompt: list[int], n_tokens: int, **options: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=n_tokens, **options)
    return [int(token) for token, _ in steps]


def logits_fed(model: Any, tokens: list[int], pieces: list[int]) -> mx.array:
    """Logits of all tokens, fed through a cache in pieces of the given lengths."""
    caches, at, out = make_prompt_cache(model), 0, []
    for n in pieces:
        out.append(model(mx.array([tokens[at : at + n]]), cache=caches)[0])
        at += n
    assert at == len(tokens)
    result = mx.concatenate(out)
    mx.eval(result)
    return result


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.all(a == b).item())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Path]:
    @cache
    def folder(kind: str, bits: Any) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("model") / f"{kind}-{bits}", kind=kind, bits=bits)

    return folder


TOKENS = [(7 * n * n + 3 * n) % 100 for n in range(72)]
WHOLE, SINGLY, SPLIT = [72], [1] * 8 + [64], [31, 41]


@pytest.fixture(scope="module")
def stock_logits(folders: Any) -> Callable[[str, Any], list[mx.array]]:
    """Logits of `TOKENS` by stock mlx-lm, fed in each of the three ways; computed once a model."""

    @cache
    def logits(kind: str, bits: Any) -> list[mx.array]:
        stock, _ = load_model(folders(kind, bits))
        return [logits_fed(stock, TOKENS, pieces) for pieces in (WHOLE, SINGLY, SPLIT)]

    return logits


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("kind", "bits"), CASES, ids=lambda v: str(v))
def test_streamed_logits_equal_resident_logits(
    folders: Any, stock_logits: Any, kind: str, bits: Any, pool: str
) -> None:
    folder = folders(kind, bits)
    streamed, _ = load_streamed(folder, cache_gb=budget_gb(folder, pool))
    for pieces, expected in zip((WHOLE, SINGLY, SPLIT), stock_logits(kind, bits), strict=True):
        assert same(logits_fed(streamed, TOKENS, pieces), expected), pieces


LONG = [("qwen3_next", 4, "one slot a layer"), ("qwen3_5_moe", "mixed", "everything")]
REST = [(*case, pool) for case in CASES for pool in ("one slot a layer", "everything") if (*case, pool) not in LONG]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "bits", "pool"),
    [*LONG, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],  # a minute for all of them
    ids=str,
)
def test_400_greedy_tokens_equal_those_of_stock_mlx_lm(folders: Any, kind: str, bits: Any, pool: str) -> None:
    folder = folders(kind, bits)
    stock, _ = load_model(folder)
    streamed, _ = load_streamed(folder, cache_gb=budget_gb(folder, pool))
    expected = greedy(stock, PROMPT, 400)
    assert len(set(expected)) > 20, "a model that repeats itself proves little"
    assert greedy(streamed, PROMPT, 400) == expected


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 7, 2048])
def test_a_long_prompt_goes_on_alike_at_every_prefill_step(folders: Any, step: int) -> None:
    folder = folders("qwen3_next", 4)
    prompt = [(n * n + 5 * n) % 128 for n in range(300)]
    stock, _ = load_model(folder)
    streamed, _ = load_streamed(folder, cache_gb=budget_gb(folder, "one token's experts"))
    expected = greedy(stock, prompt, 20, prefill_step_size=2048)
    assert greedy(streamed, prompt, 20, prefill_step_size=step) == expected


@pytest.mark.parametrize("pool", ["one token's experts"])
@pytest.mark.parametrize(("kind", "bits"), CASES, ids=lambda v: str(v))
def test_container_and_checkpoint_give_the_same_logits(
    folders: Any, tmp_path: Path, kind: str, bits: Any, pool: str
) -> None:
    folder = folders(kind, bits)
    container = tmp_path / "model.qpack"
    repack_checkpoint(folder, container)
    tokens = [(11 * n + 5) % 100 for n in range(70)]
    results = []
    for path in (folder, container):
        model, _ = load_streamed(path, cache_gb=budget_gb(folder, pool))
        results.append(logits_fed(model, tokens, [64, 1, 1, 4]))
    assert same(*results)


def test_answers_do_not_depend_on_what_the_pool_held_before(folders: Any) -> None:
    folder = folders("qwen3_5_moe", 8)
    streamed, _ = load_streamed(folder, cache_gb=budget_gb(folder, "half"))
    first = greedy(streamed, PROMPT, 40)
    greedy(streamed, [99, 98, 97, 96], 40)  # other experts take the slots
    assert greedy(streamed, PROMPT, 40) == first
