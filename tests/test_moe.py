"""The streamed layer computes what the stock layer computes, whenever its graph is evaluated."""

from __future__ import annotations

import gc
import importlib
import inspect
import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import make_checkpoint

from swiftlet_mlx import loader, memory, pools
from swiftlet_mlx.checkpoint import open_checkpoint
from swiftlet_mlx.errors import StreamingUnsupported
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.moe import Ahead, Streamed, stream
from swiftlet_mlx.pools import Pools
from swiftlet_mlx.slots import EMPTY, SlotPool

TOKENS = [1, 5, 9, 42, 7, 99, 3, 17, 64, 2, 88, 51]
SMALL = {"layers": 3, "hidden": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def folder(kind: str = "qwen3_next", bits: Any = 4, dtype: mx.Dtype = mx.float32, seed: int = 0) -> Path:
        at = tmp_path_factory.mktemp("moe") / "model"
        return make_checkpoint(at, kind=kind, bits=bits, dtype=dtype, seed=seed, shape=SMALL, full_attention_interval=3)

    return folder


def gb(folder: Path, slots: int) -> float:
    """The budget that gives each layer so many slots, as nearly as the minimum allows."""
    checkpoint = open_checkpoint(folder)
    wanted = sum(slots * t.payload_bytes for t in checkpoint.tables.values())
    return max(wanted, memory.minimum_bytes(checkpoint.tables, checkpoint.shape.top_k)) / memory.GB


def streamed(folder: Path, slots: int) -> Any:
    """A model with exactly so many slots a layer."""
    model: Any = load_streamed(folder, cache_gb=gb(folder, slots), threads=2)[0]
    for pool in model.pools.layers.values():
        if pool.n_slots != slots:
            pool.resize(slots)
    return model


def decode(model: Any, tokens: list[int] = TOKENS) -> list[mx.array]:
    state, out = make_prompt_cache(model), []
    for token in tokens:
        out.append(model(mx.array([[token]]), cache=state))
        mx.eval(out[-1])
    return out


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(x.dtype == y.dtype and bool(mx.array_equal(x, y).item()) for x, y in zip(a, b, strict=True))


# ---- equal to stock ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 5, 8])  # MLX's CPU build multiplies unquantized experts in float32 only
@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        (None, mx.float32),
        (4, mx.bfloat16),
        (8, mx.float16),
        ("mixed", mx.float32),
    ],
    ids=lambda v: str(v).replace("mlx.core.", ""),
)
def test_decoding_equals_stock_for_every_kind_of_expert_and_pool(
    folders: Any, bits: Any, dtype: mx.Dtype, slots: int
) -> None:
    folder = folders("qwen3_next", bits, dtype)
    model = streamed(folder, slots)
    assert same(decode(model), decode(load_model(folder)[0]))
    stats = model.pools.stats
    assert stats.read_backs == (0 if slots == 8 else 3 * len(TOKENS))
    assert (stats.misses == 0) == (slots == 8)
    model.pools.close()


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe"])
def test_a_batch_that_needs_more_experts_than_slots_goes_through_in_waves(folders: Any, kind: str) -> None:
    folder = folders(kind)
    ids = mx.array(np.random.default_rng(1).integers(0, 128, (40, 1)))  # 80 pairs: stock sorts them
    expected = load_model(folder)[0](ids)
    for slots in (1, 3):
        model = streamed(folder, slots)
        assert same([model(ids)], [expected])
        few = ids[:5]
        assert same([model(few)], [load_model(folder)[0](few)])
        model.pools.close()


def test_a_device_that_does_not_see_host_writes_gets_staged_fills(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("qwen3_next")
    expected = decode(load_model(folder)[0])
    monkeypatch.setattr(SlotPool, "_sees_host_writes", lambda self: False)
    said: list[str] = []
    for slots in (1, 3, 8):
        model: Any = load_streamed(folder, cache_gb=gb(folder, slots), warn=said.append)[0]
        assert not model.pools.direct
        assert same(decode(model), expected)
        model.pools.close()
    assert any("copied on their way in" in text for text in said)


# ---- evaluated late ----------------------------------------------------------------------------------------------


def blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.layers]


@pytest.mark.parametrize("start", [None, mx.async_eval], ids=["lazy", "async"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_outputs_built_one_after_the_other_and_evaluated_last_keep_their_own_experts(
    folders: Any, slots: int, start: Callable[..., None] | None
) -> None:
    folder = folders("qwen3_next")
    model, plain = streamed(folder, slots), load_model(folder)[0]
    xs = [mx.random.normal((1, 1, 64), key=mx.random.key(n)) for n in range(12)]
    late = []
    for x in xs:  # every call overwrites slots that the one before may still want to read
        late.append(blocks(model)[0](x))
        if start is not None:
            start(late[-1])
    late.reverse()
    expected = [blocks(plain)[0](x) for x in reversed(xs)]
    mx.eval(late, expected)
    assert same(late, expected)
    model.pools.close()


def test_sequences_stepped_in_turn_and_evaluated_together_equal_stock(folders: Any) -> None:
    folder = folders("qwen3_next")
    model, plain = streamed(folder, 2), load_model(folder)[0]
    results = []
    for which in (model, plain):
        caches = [make_prompt_cache(which) for _ in range(3)]
        out = [which(mx.array([[t + 7 * n]]), cache=caches[n]) for t in (3, 11, 40) for n in range(3)]
        mx.eval(out)
        results.append(out)
    assert same(*results)
    model.pools.close()


def test_a_slot_is_never_claimed_while_a_graph_that_reads_it_is_unevaluated(folders: Any) -> None:
    model = streamed(folders("qwen3_next"), 2)
    block = blocks(model)[0]
    block(mx.random.normal((1, 1, 64)))
    with pytest.raises(RuntimeError, match="unevaluated"):
        model.pools.begin(block.switch_mlp.pool, [0, 1])
    model.pools.close()


def test_a_large_output_is_evaluated_at_once_instead_of_being_kept(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "HOLD_BYTES", 100)
    folder = folders("qwen3_next")
    model = streamed(folder, 2)
    assert same(decode(model), decode(load_model(folder)[0]))
    assert not model.pools._readers
    model.pools.close()


@pytest.mark.parametrize("part", ["layer", "mlp"])
def test_a_layer_that_is_wrapped_and_evaluated_waits_for_its_reads(folders: Any, part: str) -> None:
    class Looked:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = self.inner(*args, **kwargs)
            mx.eval(out)
            seen.append(out)
            return out

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    folder, seen = folders("qwen3_next"), []
    model = streamed(folder, 2)
    model.pools.alone = True
    read = model.pools.source.read
    model.pools.source.read = lambda *given: (time.sleep(0.002), read(*given))[1]
    for n, layer in enumerate(model.model.layers):
        if part == "layer":
            model.model.layers[n] = Looked(layer)
        else:
            layer.mlp = Looked(layer.mlp)
    assert same(decode(model), decode(load_model(folder)[0]))
    assert len(seen) == 3 * len(TOKENS)
    model.pools.close()


# ---- the shared expert beside it -----------------------------------------------------------------------------------


def test_reads_are_issued_before_the_shared_expert_is_evaluated(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(folders("qwen3_next"), 2)
    order: list[str] = []
    begin, settle, start = model.pools.begin, model.pools._settle, Ahead.start
    monkeypatch.setattr(model.pools, "begin", lambda *a: (order.append("issue"), begin(*a))[1])
    monkeypatch.setattr(model.pools, "_settle", lambda: (order.append("wait"), settle())[1])
    monkeypatch.setattr(Ahead, "start", lambda self, x: (order.append("shared"), start(self, x))[1])
    decode(model, TOKENS[:1])
    assert order == ["issue", "shared", "wait"] * 3
    model.pools.close()


def test_the_shared_expert_is_computed_once_a_layer(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(folders("qwen3_next"), 2)
    calls: list[int] = []
    stock = next(k for k in type(blocks(model)[0].shared_expert).__mro__ if k is not Ahead and not issubclass(k, Ahead))
    compute = stock.__call__
    monkeypatch.setattr(stock, "__call__", lambda self, x: (calls.append(1), compute(self, x))[1])
    decode(model)
    assert len(calls) == 3 * len(TOKENS)
    model.pools.close()


def test_another_input_than_the_one_started_is_computed_afresh(folders: Any) -> None:
    folder = folders("qwen3_next")
    shared = blocks(streamed(folder, 2))[0].shared_expert
    plain = blocks(load_model(folder)[0])[0].shared_expert
    a, b = mx.random.normal((1, 1, 64)), mx.random.normal((1, 1, 64))
    shared.start(a)
    assert same([shared(b), shared(a)], [plain(b), plain(a)])


def test_models_without_a_shared_expert_have_nothing_beside(folders: Any) -> None:
    model = streamed(folders("qwen3_moe"), 2)
    assert all(block.switch_mlp.beside is None for block in blocks(model))
    model.pools.close()


def test_a_shared_expert_that_is_given_something_else_is_not_started(tmp_path: Path) -> None:
    shape = {"layers": 3, "hidden": 64}
    more = {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32}
    for latent, beside in ((32, False), (64, False), (None, True)):  # experts that work in a latent space
        folder = tmp_path / str(latent)
        make_checkpoint(folder, kind="nemotron_h", bits=4, shape=shape, moe_latent_size=latent, **more)
        model = streamed(folder, 2)
        assert (model.layers[1].mixer.switch_mlp.beside is not None) is beside
        assert same(decode(model), decode(load_model(folder)[0]))
        model.pools.close()


# ---- residency belongs to a model ----------------------------------------------------------------------------------


def test_two_models_in_one_process_do_not_see_each_other(folders: Any) -> None:
    paths = [folders("qwen3_next", 4, mx.float32, seed) for seed in (0, 1)]
    expected = [decode(load_model(path)[0]) for path in paths]
    assert not same(*expected)
    models = [streamed(path, 2) for path in paths]
    states = [make_prompt_cache(m) for m in models]
    out: list[list[mx.array]] = [[], []]
    for token in TOKENS:
        for n in (0, 1):
            out[n].append(models[n](mx.array([[token]]), cache=states[n]))
    mx.eval(out)
    assert same(out[0], expected[0])
    assert same(out[1], expected[1])
    models[0].pools.close()
    del models[0], states
    again = streamed(paths[0], 1)
    assert same(decode(again), expected[0])
    assert same(decode(models[0]), expected[1])
    again.pools.close()


def test_a_model_that_is_dropped_frees_its_slots(folders: Any) -> None:
    for options in ({"cache_gb": gb(folders("qwen3_next"), 3)}, {}):
        model: Any = load_streamed(folders("qwen3_next"), **options)[0]
        decode(model)
        pool = weakref.ref(model.pools.layers[0])
        gc.collect()
        gc.disable()  # by its references alone, or its memory would be in the way of the next model's
        try:
            model.pools.close()
            del model
            assert pool() is None
        finally:
            gc.enable()


def test_resizing_between_tokens_changes_memory_and_no_answer(folders: Any) -> None:
    folder = folders("qwen3_next")
    expected = decode(load_model(folder)[0])
    model = streamed(folder, 4)
    state, out = make_prompt_cache(model), []
    for n, token in enumerate(TOKENS):
        out.append(model(mx.array([[token]]), cache=state))  # still lazy when the pools change
        for pool in model.pools.layers.values():
            pool.resize((3, 8, 1, 5)[n % 4])
            assert len(pool.policy.residents) <= pool.n_slots
    mx.eval(out)
    assert same(out, expected)
    model.pools.close()


def test_layers_with_every_expert_resident_do_no_read_back_and_the_others_do(folders: Any) -> None:
    folder = folders("qwen3_next")
    model = streamed(folder, 8)
    model.pools.layers[1].resize(2)
    assert same(decode(model), decode(load_model(folder)[0]))
    assert model.pools.stats.read_backs == len(TOKENS)
    model.pools.close()


# ---- counted, recorded, refused --------------------------------------------------------------------------------------


def test_hits_misses_and_reads_are_those_of_the_recorded_routes(folders: Any) -> None:
    from swiftlet_mlx.policy import LFU

    model = streamed(folders("qwen3_next"), 3)
    trace: list[tuple[int, list[int]]] = []
    model.pools.recorder = lambda layer, experts: trace.append((layer, experts))
    decode(model)
    assert len(trace) == 3 * len(TOKENS)
    hits = misses = evictions = 0
    caches = {layer: LFU() for layer in model.pools.layers}
    for layer, experts in trace:  # the same policy without a disk
        lfu = caches[layer]
        lfu.use(experts)
        for e in [e for e in experts if e not in lfu.residents]:
            misses += 1
            if len(lfu.residents) == 3:
                lfu.evict(experts)
                evictions += 1
            lfu.add(e)
            hits -= 1
        hits += len(experts)
    stats = model.pools.stats
    assert (stats.hits, stats.misses, stats.evictions) == (hits, misses, evictions)
    assert stats.reads == misses
    assert stats.read_bytes == misses * model.pools.layers[0].table.payload_bytes
    assert 0 < stats.hit_rate < 1
    model.pools.close()


def test_routes_are_recorded_for_resident_layers_too(folders: Any) -> None:
    folder = folders("qwen3_next")
    model = streamed(folder, 8)
    trace: list[tuple[int, list[int]]] = []
    model.pools.recorder = lambda layer, experts: trace.append((layer, experts))
    assert same(decode(model), decode(load_model(folder)[0]))
    assert len(trace) == 3 * len(TOKENS)
    model.pools.close()


def test_experts_of_another_shape_are_refused(folders: Any) -> None:
    from mlx_lm.models.switch_layers import SwitchGLU

    model = streamed(folders("qwen3_next"), 2)
    for model_has, said in (
        (SwitchGLU(64, 96, 8), "layers.0.mlp.down_proj: unknown quantization"),
        (SwitchGLU(128, 32, 8), r"down_proj: an expert's weight is \[64, 4\], the model needs \[128, 4\]"),
    ):
        with pytest.raises(StreamingUnsupported, match=said):
            stream(model_has, "layers.0.mlp", 0, model.pools)
    with pytest.raises(StreamingUnsupported, match="bias"):
        stream(SwitchGLU(64, 32, 8, bias=True), "layers.0.mlp", 0, model.pools)
    model.pools.close()


def test_streamed_layers_survive_what_mlx_lm_does_to_modules(folders: Any) -> None:
    model = streamed(folders("qwen3_next"), 2)
    before = decode(model)
    model.freeze()
    model.eval()
    model.update(tree_map(lambda p: p, model.parameters()))
    assert same(decode(model), before)
    assert all(isinstance(block.switch_mlp, Streamed) for block in blocks(model))
    assert all(set(p.slots) - {EMPTY} for p in model.pools.layers.values())
    model.pools.close()


# ---- building on while experts are read ------------------------------------------------------------------------------


def slow(model: Any, seconds: float = 0.01) -> None:
    """Reads that take their time and leave garbage in the slot until they are done, in a model that an engine owns."""
    model.pools.alone = True
    inner = model.pools.source.read

    def read(layer: int, first: int, rows: Any) -> int:
        for row in rows:
            for view in row:
                view[:] = b"\x7f" * len(view)
        time.sleep(seconds)
        return int(inner(layer, first, rows))

    model.pools.source.read = read


def note_reads_under_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether reads were under way, each time a layer's graph was built."""
    monkeypatch.setattr(pools, "LONG_SECONDS", float("inf"))  # nor are hits looked up apart
    monkeypatch.setattr(Pools, "may_choose_later", lambda *given: False)
    noted: list[bool] = []
    lookup = SlotPool.lookup_few

    def noting(pool: SlotPool, *given: Any) -> mx.array:
        noted.append(model.pools._open is not None)
        return lookup(pool, *given)

    monkeypatch.setattr(SlotPool, "lookup_few", noting)
    return noted


def test_a_model_builds_on_while_its_experts_are_read_and_evaluates_nothing_before(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("qwen3_next")
    model = streamed(folder, 2)
    slow(model)
    open_at_build = note_reads_under_way(model, monkeypatch)
    assert same(decode(model), decode(load_model(folder)[0]))
    assert any(open_at_build), "nothing was built while experts were read"
    assert model.pools._open is None
    model.pools.close()


def test_a_model_that_no_engine_owns_may_be_looked_into_anywhere(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("qwen3_next")
    expected = decode(load_model(folder)[0])
    model = streamed(folder, 2)
    slow(model)
    model.pools.alone = False
    inner = Streamed.__call__

    def looked_into(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        y = inner(self, x, indices)
        mx.eval(y)
        return y

    monkeypatch.setattr(Streamed, "__call__", looked_into)
    assert same(decode(model), expected)
    model.pools.close()


def test_the_last_layers_experts_have_arrived_when_the_model_returns(folders: Any) -> None:
    folder = folders("qwen3_next")
    model, plain = streamed(folder, 2), load_model(folder)[0]
    slow(model)
    for token in TOKENS:
        got = model(mx.array([[token]]))
        assert model.pools._open is None
        assert same([got], [plain(mx.array([[token]]))])
    model.pools.close()


def test_a_block_called_on_its_own_waits_for_its_experts(folders: Any) -> None:
    folder = folders("qwen3_next")
    model, plain = streamed(folder, 2), load_model(folder)[0]
    slow(model)
    x = mx.random.normal((1, 1, 64))
    assert same([blocks(model)[1](x)], [blocks(plain)[1](x)])
    model.pools.close()


def test_a_batch_whose_output_is_too_large_to_hold_waits_for_its_experts(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "HOLD_BYTES", 100)
    folder = folders("qwen3_next")
    model = streamed(folder, 3)
    slow(model)
    ids = mx.array([[t] for t in (3, 4)])
    assert same([model(ids)], [load_model(folder)[0](ids)])
    model.pools.close()


def test_models_that_may_evaluate_on_their_way_do_not_build_on(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "GRAPH_ONLY", set())
    folder = folders("qwen3_next")
    model = streamed(folder, 2)
    slow(model)
    open_at_build = note_reads_under_way(model, monkeypatch)
    assert same(decode(model), decode(load_model(folder)[0]))
    assert not any(open_at_build)
    model.pools.close()


def test_what_mlx_lm_builds_of_these_models_is_a_graph_and_nothing_else() -> None:
    for name in loader.GRAPH_ONLY:
        module = importlib.import_module(name)
        source = inspect.getsource(module)
        for word in ("mx.eval", "async_eval", ".item()", ".tolist()", "np.array"):
            assert word not in source, (name, word)


# ---- hits beside misses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_experts_that_are_there_compute_while_the_others_are_read(
    folders: Any, monkeypatch: pytest.MonkeyPatch, alone: bool, bits: int | None
) -> None:
    folder = folders("qwen3_next", bits)
    expected = decode(load_model(folder)[0])
    begun: list[list[int]] = []
    begin = Streamed._begin_hits

    def noting(self: Any, *given: Any) -> Any:
        early = begin(self, *given)
        begun.extend([early[0]] if early is not None else [])
        return early

    monkeypatch.setattr(Streamed, "_begin_hits", noting)
    for slots in (2, 3, 5):
        monkeypatch.setattr(pools, "LONG_SECONDS", float("inf"))
        model = streamed(folder, slots)
        model.pools.alone = alone
        assert same(decode(model), expected)
        assert not begun, "split although nothing takes long"
        monkeypatch.setattr(pools, "LONG_SECONDS", -1.0)
        assert same(decode(model), expected)
        assert begun
        begun.clear()
        monkeypatch.undo()
        monkeypatch.setattr(Streamed, "_begin_hits", noting)
        model.pools.close()


def test_a_batch_is_not_split(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("qwen3_next")
    monkeypatch.setattr(pools, "LONG_SECONDS", -1.0)
    model, plain = streamed(folder, 8), load_model(folder)[0]
    model.pools.resize(sum(5 * pool.table.payload_bytes for pool in model.pools.layers.values()))
    rows = mx.array([[token] for token in TOKENS[:2]])
    assert same([model(rows)], [plain(rows)])
    model.pools.close()


def test_long_waits_are_noticed_and_forgotten(folders: Any) -> None:
    model = streamed(folders("qwen3_next"), 2)
    slow(model)
    assert not model.pools.waits_long
    decode(model)
    assert model.pools.waits_long
    model.pools._typical_wait = 0.0
    model.pools.close()
