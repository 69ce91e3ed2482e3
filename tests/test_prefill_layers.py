"""The layer-major pass against stock mlx-lm, with experts that are resident: what the pass itself must get
right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5_moe, qwen3_moe, qwen3_next
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from swiftlet_mlx import prefill as p
from swiftlet_mlx.errors import ContextFull, MemoryFull
from swiftlet_mlx.layer_major import LayerMajor, use_layer_major, use_stock_layers
from swiftlet_mlx.routes import Layout, Routes, groups

E, K, V = 16, 4, 96
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": E,
    "num_experts_per_tok": K,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": V,
    "mlp_only_layers": [1],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
KINDS = {"qwen3_next": qwen3_next, "qwen3_5_moe": qwen3_5_moe, "qwen3_moe": qwen3_moe}


class Resident(nn.Module):
    """Stock experts with the interface of streamed ones; counts what it is asked for."""

    def __init__(self, glu: nn.Module, size: int) -> None:
        super().__init__()
        self.glu = glu
        self.n_experts = E
        self._size = size
        self.asked: list[int] = []

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return self.glu(x, indices)

    def read_back(self, indices: mx.array) -> Any:
        return np.array(indices)

    def close(self) -> None:
        pass

    def arrange(self, routes: Routes) -> Layout:
        self.layout = routes.lay_out(routes.experts, 1)
        return self.layout

    def compute(self, x: mx.array) -> Iterator[mx.array]:
        starts = self.layout.starts.tolist()
        experts = np.array(self.layout.experts, np.uint32)[self.layout.tiles]
        for group in groups(range(len(self.layout.experts)), self._size):
            self.asked += [self.layout.experts[i] for i in group]
            for a in range(starts[group[0]], starts[group[-1] + 1], 300):
                b = min(a + 300, starts[group[-1] + 1])
                rows, idx = x[mx.array(self.layout.pairs[a:b] // K)][:, None], mx.array(experts[a:b])
                up = self.glu.up_proj(rows, idx, sorted_indices=True)
                gate = self.glu.gate_proj(rows, idx, sorted_indices=True)
                y = self.glu.down_proj(self.glu.activation(up, gate), idx, sorted_indices=True)
                yield y.squeeze(-2)


def stock(kind: str, *, quantized: bool = True) -> Any:
    mx.random.seed(5)
    model = KINDS[kind].Model(KINDS[kind].ModelArgs.from_dict({"model_type": kind, **CONFIG}))
    if quantized:
        nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "num_experts"))
    mx.eval(model.parameters())
    return model


def resident(module: Any) -> Any:
    return (lambda: module) if isinstance(module, Resident) else None


def layer_major(kind: str, *, size: int = 5, quantized: bool = True, **settings: Any) -> Any:
    model = stock(kind, quantized=quantized)
    for layer in model.layers:
        if hasattr(layer.mlp, "switch_mlp"):
            layer.mlp.switch_mlp = Resident(layer.mlp.switch_mlp, size)
    assert use_layer_major(model, LayerMajor(**settings), resident) == 4
    return model


def ids(n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, V, n)]


def same_cache(a: list[Any], b: list[Any]) -> bool:
    for x, y in zip(a, b, strict=True):
        for (_, u), (_, v) in zip(tree_flatten(trimmed(x)), tree_flatten(trimmed(y)), strict=True):
            if not np.array_equal(np.array(u), np.array(v)):
                return False
    return True


def trimmed(cache: Any) -> Any:
    """What of a cache counts: a key-value cache holds unused room at its end."""
    return cache.keys_and_values() if hasattr(cache, "keys_and_values") else list(cache.cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "chunk"), [(1, 7), (5, 64), (16, 4096)])
def test_prefill_equals_stock_to_the_bit_at_any_group_and_chunk_size(kind: str, size: int, chunk: int) -> None:
    tokens = ids(130)
    plain, ours = stock(kind), layer_major(kind, size=size, chunk_tokens=chunk)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours)
    mx.eval(plain(mx.array([tokens[:-1]]), cache=want))
    p.prefill(ours, tokens[:-1], got)
    assert same_cache(want, got)
    last = mx.array([tokens[-1:]])
    assert np.array_equal(np.array(plain(last, cache=want)), np.array(ours(last, cache=got)))
    assert same_cache(want, got)


@pytest.mark.parametrize("kind", KINDS)
def test_unquantized_experts_are_bit_equal_too(kind: str) -> None:
    tokens = ids(90)
    plain, ours = stock(kind, quantized=False), layer_major(kind, quantized=False, chunk_tokens=32)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours)
    mx.eval(plain(mx.array([tokens]), cache=want))
    p.prefill(ours, tokens, got)
    assert same_cache(want, got)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_prefill_gives_all_logits_to_the_bit(kind: str) -> None:
    plain, ours = stock(kind), layer_major(kind, chunk_tokens=16)
    for batch in (1, 2):
        x = mx.array([ids(40)] * batch) + mx.arange(batch)[:, None]
        assert np.array_equal(np.array(plain(x)), np.array(ours(x))), "without a cache"
        a, b = make_prompt_cache(plain), make_prompt_cache(ours)
        assert np.array_equal(np.array(plain(x, cache=a)), np.array(ours(x, cache=b)))
        assert same_cache(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [1, 90])
def test_a_cached_prefix_is_continued_to_the_bit(kind: str, held: int) -> None:
    tokens = ids(held + 60)
    plain, ours = stock(kind), layer_major(kind, chunk_tokens=33)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours)
    for a, b in ((0, held), (held, held + 60)):
        mx.eval(plain(mx.array([tokens[a:b]]), cache=want))
        mx.eval([c.state for c in want])
        p.prefill(ours, tokens[a:b], got)
    assert same_cache(want, got)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_step_drives_it_with_its_own_steps(kind: str) -> None:
    tokens = mx.array(ids(100))
    plain, ours = stock(kind), layer_major(kind, chunk_tokens=20)
    for step in (2048, 64):
        want = list(generate_step(tokens, plain, max_tokens=4, prefill_step_size=step))
        got = list(generate_step(tokens, ours, max_tokens=4, prefill_step_size=step))
        assert [t for t, _ in got] == [t for t, _ in want]
        assert all(np.array_equal(np.array(a), np.array(b)) for (_, a), (_, b) in zip(got, want, strict=True))


def greedy(model: Any, cache: list[Any], token: int, n: int) -> list[int]:
    out = []
    for _ in range(n):
        token = int(mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]).item())
        out.append(token)
    return out


@pytest.mark.parametrize(
    ("kind", "n"), [*((k, 20) for k in KINDS), *(pytest.param(k, 400, marks=pytest.mark.slow) for k in KINDS)]
)
def test_sums_taken_on_arrival_differ_by_float32_rounding_and_not_in_what_is_said(kind: str, n: int) -> None:
    tokens = ids(180)
    plain, ours = stock(kind), layer_major(kind, chunk_tokens=50, pair_bytes=0)
    want, got, again = (make_prompt_cache(m) for m in (plain, ours, ours))
    mx.eval(plain(mx.array([tokens[:-1]]), cache=want))
    p.prefill(ours, tokens[:-1], got)
    p.prefill(ours, tokens[:-1], again)
    assert same_cache(got, again), "the order of the sums must not vary from run to run"
    assert not same_cache(want, got), "with other sums some bit must differ, or this test proves nothing"
    for x, y in zip(want, got, strict=True):
        for (_, u), (_, v) in zip(tree_flatten(trimmed(x)), tree_flatten(trimmed(y)), strict=True):
            assert np.abs(np.array(u) - np.array(v)).max() < 1e-5  # values about 1, four layers of float32
    assert greedy(plain, want, tokens[-1], n) == greedy(ours, got, tokens[-1], n)


def test_the_last_layers_experts_are_left_out_where_only_the_cache_is_wanted() -> None:
    ours = layer_major("qwen3_next")
    p.prefill(ours, ids(50), make_prompt_cache(ours))
    assert ours.layers[2].mlp.switch_mlp.asked
    assert not ours.layers[3].mlp.switch_mlp.asked
    mx.eval(ours(mx.array([ids(50)])))
    assert ours.layers[3].mlp.switch_mlp.asked


@pytest.mark.parametrize("n", [2, 63, 500])
def test_every_expert_is_asked_for_once(n: int) -> None:
    ours = layer_major("qwen3_moe", size=3, chunk_tokens=50)
    p.prefill(ours, ids(n), make_prompt_cache(ours))
    for layer in ours.layers:
        if hasattr(layer.mlp, "switch_mlp"):
            asked = layer.mlp.switch_mlp.asked
            assert len(asked) == len(set(asked))


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe"])
@pytest.mark.parametrize(("held", "at"), [(0, 1), (0, 20), (40, 9), (40, 20)])
def test_stopping_leaves_model_and_cache_as_they_were(kind: str, held: int, at: int) -> None:
    tokens = ids(held + 120)
    ours = layer_major(kind, chunk_tokens=40)
    cache, untouched = make_prompt_cache(ours), make_prompt_cache(ours)
    if held:
        p.prefill(ours, tokens[:held], cache)
        p.prefill(ours, tokens[:held], untouched)
    seen = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == at:
            raise Stop

    with pytest.raises(Stop):
        p.prefill(ours, tokens[held:], cache, progress=stop)
    assert len(seen) == at
    if held:
        assert same_cache(cache, untouched)
    p.prefill(ours, tokens[held:], cache)
    p.prefill(ours, tokens[held:], untouched)
    assert same_cache(cache, untouched)
    assert ours.layers[0].mlp.switch_mlp.__class__ is Resident


def test_progress_runs_from_little_to_all_and_knows_the_layers() -> None:
    ours = layer_major("qwen3_5_moe", chunk_tokens=50)
    seen: list[p.PrefillProgress] = []
    pairs: list[tuple[int, int]] = []
    p.prefill(
        ours,
        ids(200),
        make_prompt_cache(ours),
        progress=lambda done, total: pairs.append((done, total)),
        watch=seen.append,
    )
    assert pairs == [(s.tokens, s.total_tokens) for s in seen]
    done = [s.tokens for s in seen]
    assert done == sorted(done)
    assert (done[-1], seen[-1].total_tokens, seen[-1].n_layers) == (200, 200, 4)
    assert {s.layers for s in seen} == {0, 1, 2, 3, 4}
    assert all(s.seconds_left >= 0 for s in seen)


def test_a_prompt_beyond_the_context_is_refused_before_anything_is_computed() -> None:
    ours = layer_major("qwen3_5_moe")
    cache = make_prompt_cache(ours)
    p.prefill(ours, ids(100), cache)
    calls = len(ours.layers[0].mlp.switch_mlp.asked)
    with pytest.raises(ContextFull, match=r"8193 tokens \(100 of them cached\).*8192"):
        p.prefill(ours, [1] * 8093, cache)
    assert len(ours.layers[0].mlp.switch_mlp.asked) == calls
    assert cache[3].offset == 100


def test_the_change_can_be_undone_and_other_models_never_see_it() -> None:
    plain, ours = stock("qwen3_next"), layer_major("qwen3_next")
    assert type(plain.layers[0]) is not type(ours.layers[0])
    assert isinstance(ours.layers[0], type(plain.layers[0]))
    names = [n for n, _ in tree_flatten(ours.parameters())]
    assert use_layer_major(ours, experts_of=resident) == 0, "done already"
    assert use_stock_layers(ours) == 4
    assert type(plain.layers[0]) is type(ours.layers[0])
    assert [n for n, _ in tree_flatten(ours.parameters())] == names
    before = len(ours.layers[0].mlp.switch_mlp.asked)
    mx.eval(ours(mx.array([ids(20)])))
    assert len(ours.layers[0].mlp.switch_mlp.asked) == before


class Squares(nn.Module):
    """A block that does with its experts' output what no sum over choices can follow."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return mx.square(self.inner(x))


def test_an_unforeseen_block_keeps_the_stock_path_in_steps_and_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "STEP_TOKENS", 40)
    plain, ours = stock("qwen3_moe"), stock("qwen3_moe")
    for model in (plain, ours):
        model.layers[2].mlp = Squares(model.layers[2].mlp)
    for layer in (ours.layers[0].mlp, ours.layers[2].mlp.inner, ours.layers[3].mlp):
        layer.switch_mlp = Resident(layer.switch_mlp, 5)
    assert use_layer_major(ours, experts_of=resident) == 3
    want, got = make_prompt_cache(plain), make_prompt_cache(ours)
    mx.eval(plain(mx.array([ids(99)]), cache=want))
    seen: list[int] = []
    p.prefill(ours, ids(99), got, progress=lambda done, total: seen.append(done))
    assert same_cache(want, got)
    assert not ours.layers[2].mlp.inner.switch_mlp.asked
    assert seen == [40, 80, 99]


def test_a_model_whose_caches_are_not_one_a_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = stock("qwen3_next")
    monkeypatch.setattr(type(ours), "make_cache", lambda self: [None])
    assert use_layer_major(ours, experts_of=resident) == 0


def test_caches_that_hold_a_window_are_fed_in_steps_and_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "STEP_TOKENS", 30)
    plain, ours = stock("qwen3_moe"), layer_major("qwen3_moe", chunk_tokens=8)
    want, got = ([RotatingKVCache(max_size=64) for _ in range(4)] for _ in range(2))
    for at in range(0, 100, 30):
        mx.eval(plain(mx.array([ids(100)[at : at + 30]]), cache=want))
    p.prefill(ours, ids(100), got)
    last = mx.array([[3]])
    assert np.array_equal(np.array(plain(last, cache=want)), np.array(ours(last, cache=got)))


def test_a_prompt_that_memory_cannot_hold_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = layer_major("qwen3_next")
    each, fixed = p.prefill_bytes(ours)
    assert each == 2 * 32 * 4 + 64 * (5 * 4 + 4), "one attention layer of one 32-wide head, and hidden states of 64"
    monkeypatch.setattr(p, "available_bytes", lambda: fixed + 99 * each)
    p.prefill(ours, ids(99), make_prompt_cache(ours))
    asked = len(ours.layers[0].mlp.switch_mlp.asked)
    with pytest.raises(MemoryFull, match=r"100 tokens need .* enough for 99") as refused:
        p.prefill(ours, ids(100), make_prompt_cache(ours))
    assert refused.value.context_tokens == 99
    assert len(ours.layers[0].mlp.switch_mlp.asked) == asked


def test_on_cuda_freed_memory_is_kept_meanwhile_and_the_limit_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(p, "backend", lambda: "cuda")
    monkeypatch.setattr(mx, "set_cache_limit", lambda n: (limits.append(n), 77)[1])
    ours = layer_major("qwen3_moe")
    p.prefill(ours, ids(20), make_prompt_cache(ours))
    with pytest.raises(ContextFull):
        p.prefill(ours, [1] * 9000, make_prompt_cache(ours))
    assert limits == [p.CUDA_CACHE_BYTES, 77]


def test_hidden_memory_does_not_grow_with_chunks_left_behind() -> None:
    # The pass may hold hidden states (T x H) but no chunk's attention scores or expert intermediates.
    ours = layer_major("qwen3_moe", chunk_tokens=64, pair_bytes=0)
    peaks = {}
    for n in (256, 1024):
        cache = make_prompt_cache(ours)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        p.prefill(ours, ids(n), cache)
        peaks[n] = mx.get_peak_memory() - before
    hidden = 768 * 64 * 4
    kv = 4 * 2 * 768 * 32 * 4
    scores = 2 * 64 * 768 * 4 * 3  # the CPU's attention writes one chunk's scores against the whole past
    each, _ = p.prefill_bytes(ours)
    assert 768 * each <= kv + 8 * hidden
    assert peaks[1024] - peaks[256] < 768 * each + scores
