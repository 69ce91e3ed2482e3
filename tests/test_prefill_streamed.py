"""Prefill through streamed experts against stock mlx-lm: the same bits, each expert read at most once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5_moe, qwen3_moe, qwen3_next
from mlx_lm.models.cache import make_prompt_cache

from swiftlet_mlx import expert_pass
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.layer_major import LayerMajor, part_of, use_layer_major, use_stock_layers
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.prefill import prefill, prefill_bytes

E, K, V, LAYERS = 16, 4, 96, 4
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
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
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
KINDS = {"qwen3_next": qwen3_next, "qwen3_5_moe": qwen3_5_moe, "qwen3_moe": qwen3_moe}


def stock(kind: str) -> Any:
    mx.random.seed(5)
    model = KINDS[kind].Model(KINDS[kind].ModelArgs.from_dict({"model_type": kind, **CONFIG}))
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for kind in KINDS:
        out[kind] = folder = tmp_path_factory.mktemp(kind)
        weights = dict(tree_flatten(stock(kind).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        width = {"group_size": 32, "bits": 4}
        config = {"model_type": kind, **CONFIG, "quantization": width, "quantization_config": width}
        (folder / "config.json").write_text(json.dumps(config))
    return out


class Reads:
    """A source that notes who is read, and may fail."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.tables = inner, inner.name, inner.tables
        self.seen: Counter[tuple[int, int]] = Counter()
        self.fail_at: int | None = None
        self._lock = threading.Lock()

    def read(self, layer: int, first: int, rows: Sequence[Any]) -> int:
        with self._lock:
            self.seen.update((layer, first + i) for i in range(len(rows)))
            if self.fail_at is not None and sum(self.seen.values()) >= self.fail_at:
                raise ReadFailed(f"layer {layer}, expert {first}: no such luck")
        return int(self.inner.read(layer, first, rows))

    def close(self) -> None:
        self.inner.close()


class Streamed:
    """A streamed model, its reads, and the slots of each layer."""

    def __init__(self, folder: Path, slots: int, **settings: Any) -> None:
        table = load_streamed(folder, cache_gb=1.0, threads=2)[0].pools.source.tables[0]
        self.expert_bytes = table.payload_bytes
        gb = (slots * LAYERS * self.expert_bytes + 100) / 1e9
        self.model: Any = load_streamed(folder, cache_gb=gb, threads=2)[0]
        self.pools = self.model.pools
        assert {p.n_slots for p in self.pools.layers.values()} == {slots}
        self.reads = self.pools.source = Reads(self.pools.source)
        use_stock_layers(self.model)
        assert use_layer_major(self.model, LayerMajor(**settings)) == LAYERS


@pytest.fixture
def streamed(folders: dict[str, Path]) -> Iterator[Any]:
    made: list[Streamed] = []

    def make(kind: str, slots: int, **settings: Any) -> Streamed:
        made.append(Streamed(folders[kind], slots, **settings))
        return made[-1]

    yield make
    for s in made:
        s.pools.close()


def ids(n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, V, n)]


def same_cache(a: list[Any], b: list[Any]) -> bool:
    flat = [
        [np.array(v) for c in cache for v in (c.keys_and_values() if hasattr(c, "keys") else c.cache)]
        for cache in (a, b)
    ]
    return all(np.array_equal(u, v) for u, v in zip(*flat, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [4, 7, 16])
def test_prefill_equals_stock_to_the_bit_with_any_pool(kind: str, slots: int, streamed: Any) -> None:
    tokens = ids(121)
    plain, ours = stock(kind), streamed(kind, slots, chunk_tokens=25)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours.model)
    for a, b in ((0, 60), (60, 75), (75, 120)):  # later parts continue a cached prefix, with a warm pool
        mx.eval(plain(mx.array([tokens[a:b]]), cache=want))
        mx.eval([c.state for c in want])
        prefill(ours.model, tokens[a:b], got)
        assert same_cache(want, got)
    last = mx.array([tokens[-1:]])
    assert np.array_equal(np.array(plain(last, cache=want)), np.array(ours.model(last, cache=got)))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_pools_of_a_few_slots_serve_a_whole_prompt(slots: int, streamed: Any) -> None:
    plain, ours = stock("qwen3_next"), streamed("qwen3_next", slots)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours.model)
    mx.eval(plain(mx.array([ids(90)]), cache=want))
    prefill(ours.model, ids(90), got)
    assert same_cache(want, got)
    assert max(ours.reads.seen.values()) == 1


@pytest.mark.parametrize("height", [4, 64])
def test_rows_in_tiles_give_the_same_bits(height: int, streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_pass, "tile_height", lambda rows, slots: height)  # what CUDA does
    plain, ours = stock("qwen3_next"), streamed("qwen3_next", 7, chunk_tokens=25, chunks_ahead=1)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours.model)
    for a, b in ((0, 50), (50, 110)):
        mx.eval(plain(mx.array([ids(110)[a:b]]), cache=want))
        prefill(ours.model, ids(110)[a:b], got)
        assert same_cache(want, got)
    assert max(ours.reads.seen.values()) <= 2, "once a prompt"


def routed(kind: str, tokens: list[int]) -> set[tuple[int, int]]:
    """The distinct (layer, expert) pairs that stock mlx-lm routes these tokens to."""
    model, seen = stock(kind), set()
    for i, layer in enumerate(model.layers):
        inner = layer.mlp.switch_mlp

        def note(x: mx.array, indices: mx.array, i: int = i, inner: Any = inner) -> Any:
            seen.update((i, int(e)) for e in np.unique(np.array(indices)))
            return inner(x, indices)

        layer.mlp["switch_mlp"] = note
    mx.eval(model(mx.array([tokens])))
    return seen


@pytest.mark.parametrize("n", [1, 2, 5, 300])
@pytest.mark.parametrize("slots", [2, 9])
def test_a_prompt_of_any_length_reads_each_expert_it_needs_at_most_once(n: int, slots: int, streamed: Any) -> None:
    tokens = ids(n)
    ours = streamed("qwen3_moe", slots, chunk_tokens=128)
    cache = make_prompt_cache(ours.model)
    before = ours.pools.stats.copy()
    prefill(ours.model, tokens, cache)
    needed = routed("qwen3_moe", tokens)
    seen = ours.reads.seen
    assert seen, "nothing was read: the test would prove nothing"
    assert set(seen) <= needed
    if n > 1:  # a single token goes the way of decoding, through the same pool
        assert {p for p in needed if p[0] < LAYERS - 1} == set(seen), "the last layer's experts are not needed"
    assert max(seen.values()) == 1
    done = ours.pools.stats.since(before)
    assert done.read_bytes == len(seen) * ours.expert_bytes <= len(needed) * ours.expert_bytes
    assert done.misses == len(seen)


class Mean(nn.Module):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return mx.broadcast_to(x.mean(axis=1, keepdims=True), x.shape)


@pytest.mark.long
def test_twenty_thousand_tokens_read_each_expert_once(streamed: Any) -> None:
    ours = streamed("qwen3_moe", 4, chunk_tokens=2048)
    # Attention over 20,000 tokens takes a minute on a CPU and is not what is counted here.
    for layer in ours.model.layers:
        layer.self_attn = Mean()
    prefill(ours.model, ids(20_000), make_prompt_cache(ours.model))
    assert max(ours.reads.seen.values()) == 1
    assert len(ours.reads.seen) > 4 * (LAYERS - 1), "more experts than slots, or nothing had to be streamed"


def test_residents_are_used_and_not_read(streamed: Any) -> None:
    ours = streamed("qwen3_next", 6)
    prefill(ours.model, ids(200), make_prompt_cache(ours.model))
    held = {(layer, e) for layer, p in ours.pools.layers.items() for e in p.policy.residents}
    assert len({pair for pair in held if pair[0] < LAYERS - 1}) == 6 * (LAYERS - 1)
    ours.reads.seen.clear()
    before = ours.pools.stats.copy()
    prefill(ours.model, ids(200), make_prompt_cache(ours.model))
    assert not held & set(ours.reads.seen)
    assert ours.pools.stats.since(before).hits == 6 * (LAYERS - 1)


@pytest.mark.parametrize("warm", [False, True])
def test_the_pool_ends_with_the_experts_the_tail_used_most(
    warm: bool, streamed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_pass, "TAIL_TOKENS", 8)
    ours = streamed("qwen3_moe", 6)
    if warm:
        prefill(ours.model, ids(30), make_prompt_cache(ours.model))
    chosen: dict[int, Any] = {}
    read_back = ours.pools.read_back
    monkeypatch.setattr(ours.pools, "read_back", lambda indices: chosen.setdefault(len(chosen), read_back(indices)))
    prefill(ours.model, ids(150)[::-1], make_prompt_cache(ours.model))
    for layer in range(LAYERS - 1):
        counts = Counter(chosen[layer][-8:].ravel().tolist())
        residents = ours.pools.layers[layer].policy.residents
        worst = min((counts[e] for e in residents), default=0)
        if not warm:
            assert all(counts[e] <= worst for e in range(E) if e not in residents)
        # Warm, at most half the slots may hold on to residents; the others were needed to pass through.
        assert sum(counts[e] for e in residents) >= sum(sorted(counts.values())[-3:])
        assert len(residents) == 6


def test_neighbours_on_disk_are_read_in_one_request(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = streamed("qwen3_moe", 12)
    monkeypatch.setattr(expert_pass, "IO_THREADS", 1)
    before = ours.pools.stats.copy()
    prefill(ours.model, ids(300), make_prompt_cache(ours.model))
    done = ours.pools.stats.since(before)
    assert done.misses >= E * (LAYERS - 1) - 2
    assert done.reads <= done.misses / 1.7


def test_a_failed_read_names_the_expert_and_leaves_pool_and_caches_usable(streamed: Any) -> None:
    for fail_at in (1, 30):
        ours = streamed("qwen3_next", 6, chunk_tokens=64)
        cache = make_prompt_cache(ours.model)
        ours.reads.fail_at = fail_at
        with pytest.raises(ReadFailed, match="no such luck"):
            prefill(ours.model, ids(150), cache)
        ours.reads.fail_at = None
        check_table(ours)
        plain, want = stock("qwen3_next"), make_prompt_cache(stock("qwen3_next"))
        prefill(ours.model, ids(150), cache)
        mx.eval(plain(mx.array([ids(150)]), cache=want))
        assert same_cache(want, cache)


def check_table(ours: Streamed) -> None:
    """Every slot is free or holds, byte for byte, the expert the table names."""
    for layer, pool in ours.pools.layers.items():
        residents = pool.policy.residents
        assert len(residents) + len(pool._free) == pool.n_slots, "a slot was lost"
        for e in residents:
            buffers = [bytearray(s.size) for s in pool.table.sections]
            ours.reads.inner.read(layer, e, [[memoryview(b) for b in buffers]])
            assert [bytes(r) for r in pool.rows(int(pool.slots[e]))] == [bytes(b) for b in buffers]


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_breaking_off_stops_within_a_group_and_leaves_pool_and_caches_usable(
    error: type[BaseException], streamed: Any
) -> None:
    kind = "qwen3_5_moe"
    ours = streamed(kind, 6, chunk_tokens=64)
    for at in (1, 8, 20, 33):
        cache = make_prompt_cache(ours.model)
        calls = []

        def stop(done: int, total: int, at: int = at, calls: list[int] = calls) -> None:
            calls.append(done)
            if len(calls) == at:
                raise error

        try:
            prefill(ours.model, ids(150), cache, progress=stop)
        except error:
            assert len(calls) == at, "it went on after it was told to stop"
        check_table(ours)
    plain, want, cache = stock(kind), make_prompt_cache(stock(kind)), make_prompt_cache(ours.model)
    prefill(ours.model, ids(150), cache)
    mx.eval(plain(mx.array([ids(150)]), cache=want))
    assert same_cache(want, cache)


def test_no_slot_is_claimed_while_its_results_are_unevaluated(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Reads that write at once, and results that are evaluated as late as the pass allows: if a slot were handed on
    # too early, the bytes of another expert would go into the result.
    ours = streamed("qwen3_moe", 3, chunk_tokens=500)
    monkeypatch.setattr(mx, "async_eval", lambda *a: None)
    plain = stock("qwen3_moe")
    want, got = make_prompt_cache(plain), make_prompt_cache(ours.model)
    mx.eval(plain(mx.array([ids(220)]), cache=want))
    prefill(ours.model, ids(220), got)
    assert same_cache(want, got)


def test_an_unevaluated_step_before_the_prefill_keeps_its_own_numbers(streamed: Any) -> None:
    ours, plain = streamed("qwen3_moe", 4), stock("qwen3_moe")
    one = mx.array([[5]])
    want = np.array(plain(one))
    logits = ours.model(one)  # lazy: its last layer reads slots that the prefill will overwrite
    prefill(ours.model, ids(100), make_prompt_cache(ours.model))
    assert np.array_equal(np.array(logits), want)


def test_a_decode_step_broken_off_while_reading_costs_the_next_prefill_no_slot(streamed: Any) -> None:
    ours, plain = streamed("qwen3_moe", 4), stock("qwen3_moe")
    ours.pools.begin(ours.pools.layers[0], [1, 5, 9, 11])  # and the `finish` that must follow never comes
    want, got = make_prompt_cache(plain), make_prompt_cache(ours.model)
    mx.eval(plain(mx.array([ids(80)]), cache=want))
    prefill(ours.model, ids(80), got)
    assert same_cache(want, got)
    check_table(ours)


@pytest.mark.parametrize("kind", KINDS)
def test_mlx_lms_generation_drives_it_and_reads_once_a_step(kind: str, streamed: Any) -> None:
    tokens = mx.array(ids(70))
    plain, ours = stock(kind), streamed(kind, 5, chunk_tokens=20)
    want = list(generate_step(tokens, plain, max_tokens=10))
    before = ours.pools.stats.copy()
    steps = generate_step(tokens, ours.model, max_tokens=10)
    got = [next(steps)]
    assert ours.pools.stats.since(before).misses <= E * LAYERS + 2 * K * LAYERS  # the prompt, and two steps
    got += list(steps)
    assert [t for t, _ in got] == [t for t, _ in want]
    assert all(np.array_equal(np.array(a), np.array(b)) for (_, a), (_, b) in zip(got, want, strict=True))


def test_the_budget_is_the_pools_and_nothing_else(streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_pass, "CALL_ROWS", 256)
    ours = streamed("qwen3_moe", 5, chunk_tokens=64, pair_bytes=0)
    arrays = {id(a) for p in ours.pools.layers.values() for a in p.arrays.values()}
    nbytes = ours.pools.nbytes
    peaks = {}
    for n in (256, 1024):
        cache = make_prompt_cache(ours.model)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        prefill(ours.model, ids(n), cache)
        peaks[n] = mx.get_peak_memory() - before
    assert {id(a) for p in ours.pools.layers.values() for a in p.arrays.values()} == arrays
    assert ours.pools.nbytes == nbytes
    hidden, kv, scores = 768 * 64 * 4, LAYERS * 2 * 768 * 32 * 4, 2 * 64 * 768 * 4 * 3
    assert peaks[1024] - peaks[256] < kv + 8 * hidden + scores


def test_every_layer_of_the_three_architectures_takes_part(folders: dict[str, Path]) -> None:
    for kind, folder in folders.items():
        model = load_streamed(folder, cache_gb=0.01)[0]
        assert all(part_of(layer) is not None for layer in model.layers), f"{kind}: load must install the pass"
        model.pools.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [1, 8, 16])
def test_a_long_prompt_and_400_greedy_tokens_are_those_of_stock_mlx_lm(kind: str, slots: int, streamed: Any) -> None:
    tokens = ids(1200)
    plain, ours = stock(kind), streamed(kind, slots, chunk_tokens=100)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours.model)
    mx.eval(plain(mx.array([tokens[:-1]]), cache=want))
    mx.eval([c.state for c in want])
    prefill(ours.model, tokens[:-1], got)
    a = b = tokens[-1]
    for _ in range(400):
        x, y = plain(mx.array([[a]]), cache=want)[0, -1], ours.model(mx.array([[b]]), cache=got)[0, -1]
        assert np.array_equal(np.array(x), np.array(y))
        a = b = int(mx.argmax(x).item())


@pytest.mark.slow
def test_16384_tokens_cost_no_more_than_2048_but_for_cache_and_hidden_states(streamed: Any) -> None:
    ours = streamed("qwen3_moe", 5, chunk_tokens=256, pair_bytes=0)
    for layer in ours.model.layers[1:]:  # one layer of attention is a minute's work on a CPU
        layer.self_attn = Mean()
    each, _ = prefill_bytes(ours.model)
    peaks = {}
    for n in (2048, 16384):
        cache = make_prompt_cache(ours.model)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        prefill(ours.model, ids(n), cache)
        peaks[n] = mx.get_peak_memory() - before
    more = 16384 - 2048
    scores = 2 * 256 * more * 4 * 3  # the CPU's attention writes one chunk's scores against the whole past
    assert peaks[16384] - peaks[2048] < more * each + scores
