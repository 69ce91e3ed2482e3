"""All pools of a model: prefetching, growing and shrinking, and memory that is really given back."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import make_checkpoint

from swiftlet_mlx import memory
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.layout import LayerTable, make_table
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.pools import Pools
from swiftlet_mlx.read_threads import ReadThreads
from swiftlet_mlx.reads import neighbours
from swiftlet_mlx.slots import EMPTY

TOKENS = [1, 5, 9, 42, 7, 99, 3, 17]


class Source:
    """Experts that are all made of their own number; notes every read."""

    name = origin = "made up"

    def __init__(self, layers: int = 3, experts: int = 8, size: int = 64) -> None:
        self.tables: dict[int, LayerTable] = {
            n: make_table(n, experts, {"fc1.weight": ("U8", (size,)), "fc2.weight": ("U8", (size,))})
            for n in range(layers)
        }
        self.seen: list[tuple[int, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail: set[tuple[int, int]] = set()

    def read(self, layer: int, first: int, rows: Any) -> int:
        self.gate.wait(10)
        self.seen.append((layer, first, len(rows)))
        if (layer, first) in self.fail:
            raise ReadFailed(f"layer {layer}, expert {first}")
        for n, row in enumerate(rows):
            for view in row:
                view[:] = bytes([10 * layer + first + n]) * len(view)
        return sum(len(view) for row in rows for view in row)

    def close(self) -> None: ...


def make(slots: int = 3, threads: int = 2, **options: Any) -> tuple[Source, Pools]:
    source = Source(**options)
    return source, Pools(source, dict.fromkeys(source.tables, slots), ReadThreads(threads), top_k=2)


def check(pools: Pools) -> None:
    for layer, pool in pools.layers.items():
        held = {e: s for e, s in enumerate(pool.slots) if s != EMPTY}
        assert set(held) == pool.policy.residents
        assert len(set(held.values())) == len(held)
        assert len(held) + pool.n_free == pool.n_slots, "a slot was lost"
        for e, slot in held.items():
            assert all(bytes(row) == bytes([10 * layer + e]) * len(row) for row in pool.rows(slot))
    assert pools.nbytes == sum(a.nbytes for p in pools.layers.values() for a in p.arrays.values())


# ---- loading -------------------------------------------------------------------------------------------------------


def test_neighbours_are_read_together() -> None:
    claims = [(e, 90 + e) for e in (0, 1, 2, 5, 6, 9)]
    assert [[e for e, _ in run] for run in neighbours(claims, 2)] == [[0, 1], [2], [5, 6], [9]]
    assert [[e for e, _ in run] for run in neighbours(claims, 9)] == [[0, 1, 2], [5, 6], [9]]
    assert [[e for e, _ in run] for run in neighbours(claims, 0)] == [[0], [1], [2], [5], [6], [9]]


def test_a_failed_read_is_raised_after_the_others_have_ended_and_they_stay() -> None:
    source, pools = make(slots=4)
    source.fail = {(1, 2)}
    with pytest.raises(ReadFailed, match="layer 1, expert 2"):
        pools.load(1, [0, 2, 5])
    assert pools.layers[1].policy.residents == {0, 5}
    check(pools)
    source.fail.clear()
    pools.load(1, [0, 2, 5])
    assert source.seen[-1] == (1, 2, 1), "only the failed one is read again"
    check(pools)
    pools.close()


def test_fill_reads_every_expert_of_whole_layers_once() -> None:
    source, pools = make(slots=8)
    pools.fill()
    assert sum(n for *_, n in source.seen) == 24
    assert all(pool.complete for pool in pools.layers.values())
    check(pools)
    source, pools = make(slots=7)
    pools.fill()
    assert source.seen == []


# ---- in the background ---------------------------------------------------------------------------------------------


def test_prefetched_experts_are_there_at_the_first_use_in_disk_order() -> None:
    source, pools = make(slots=4)
    pools.prefetch({0: [6, 1, 0, 7, 3], 2: [5]})
    pools._threads.drain()
    while pools._threads._idling.locked():
        time.sleep(0.001)
    assert source.seen == [(0, 0, 2), (0, 6, 2), (2, 5, 1)], "the hottest four, neighbours together"
    assert pools.layers[0].policy.residents == set(), "nothing is entered behind the owner's back"
    pools.read_back(mx.array([1]))
    assert pools.layers[0].policy.residents == {6, 1, 0, 7}
    check(pools)
    pools.load(0, [6, 1])
    assert len(source.seen) == 3
    pools.close()


def test_a_prompt_does_not_wait_for_a_prefetch() -> None:
    source, pools = make(slots=4)
    source.gate.clear()
    pools.prefetch({n: [0, 2, 4, 6] for n in range(3)})
    while pools._threads._tasks.qsize():
        time.sleep(0.001)
    threading.Timer(0.05, source.gate.set).start()
    pools.read_back(mx.array([1]))
    assert len(source.seen) == 1, "the read under way ends, the other eleven are dropped"
    check(pools)
    pools.load(0, [1, 3, 5, 7])
    check(pools)
    pools.close()


def test_a_failed_prefetch_is_no_error() -> None:
    source, pools = make(slots=4)
    source.fail = {(0, 2)}
    pools.prefetch({0: [0, 2]})
    while pools._threads._idling.locked():
        time.sleep(0.001)
    pools.read_back(mx.array([1]))
    assert pools.layers[0].policy.residents == {0}
    check(pools)
    pools.close()


def test_a_prefetch_evicts_nobody() -> None:
    _, pools = make(slots=3)
    pools.load(0, [0, 1, 2])
    pools.prefetch({0: [5, 6, 7]})
    pools.read_back(mx.array([1]))
    assert pools.layers[0].policy.residents == {0, 1, 2}
    pools.close()


# ---- more or less memory -------------------------------------------------------------------------------------------

ROUTES = st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 7), min_size=1, max_size=2)), max_size=6)


@settings(max_examples=40)
@given(st.lists(st.tuples(ROUTES, st.integers(0, 30 * 128)), min_size=1, max_size=4))
def test_live_slots_never_cost_more_than_the_budget(steps: list[tuple[Any, int]]) -> None:
    source, pools = make(slots=4, threads=1, layers=3)
    budget = pools.nbytes
    for routes, asked in steps:
        for layer, experts in routes:
            pools.load(layer, sorted(experts)[: pools.layers[layer].n_slots])
            assert pools.nbytes <= budget
            check(pools)
        pools.ask_for(asked)
        assert pools.nbytes <= budget, "nothing changes until the next step"
        pools.before_step()
        budget = max(asked, memory.minimum_bytes(source.tables, 2))
        assert pools.nbytes <= budget
        check(pools)
    pools.close()


def test_a_lowered_cap_stays_lowered_when_other_experts_are_used() -> None:
    source = Source(layers=2, experts=24)
    pools = Pools(source, {0: 12, 1: 12}, ReadThreads(2), top_k=4)
    for first in range(0, 12, 4):
        pools.load(0, range(first, first + 4))
    pools.resize(16 * 128)
    assert [p.n_slots for p in pools.layers.values()] == [8, 8]
    for first in range(12, 24, 4):
        pools.load(0, range(first, first + 4))
        assert len(pools.layers[0].policy.residents) <= 8
    check(pools)
    pools.close()


def test_bytes_of_a_smaller_pool_go_back_to_the_system() -> None:
    if sys.platform != "linux":
        pytest.skip("reads /proc/self/statm")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    mx.set_cache_limit(memory.MLX_CACHE_BYTES)
    source = Source(layers=2, experts=32, size=1 << 20)
    pools = Pools(source, {0: 24, 1: 24}, ReadThreads(2), top_k=2)
    for pool in pools.layers.values():
        pools.load(pool.table.layer, range(24))
    before = resident()
    pools.resize(pools.nbytes // 4)
    freed = before - resident()
    assert freed > 0.9 * 72 * (1 << 20), freed
    check(pools)
    pools.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pools") / "model", kind="qwen3_5_moe", bits=4)


@pytest.fixture
def model(folder: Path) -> Iterator[Any]:
    model: Any = load_streamed(folder, cache_gb=1.0, threads=2)[0]
    yield model
    model.pools.close()


def test_answers_do_not_change_while_another_thread_asks_for_less_and_more(folder: Path, model: Any) -> None:
    stock: Any = load_model(folder)[0]
    caches = make_prompt_cache(stock), make_prompt_cache(model)
    stop, sizes = threading.Event(), set()

    def ask() -> None:
        n = 0
        while not stop.wait(0.002):
            n += 1
            model.pools.ask_for((n * 7919) % 150_000)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for token in TOKENS * 4:
            x = mx.array([[token]])
            assert mx.array_equal(stock(x, cache=caches[0]), model(x, cache=caches[1])).item()
            sizes.add(model.pools.nbytes)
    finally:
        stop.set()
        asking.join()
    assert len(sizes) > 2, "the pools never changed"


def test_a_grown_pool_fills_and_ends_its_read_backs(model: Any) -> None:
    pools = model.pools
    everything = pools.nbytes
    pools.resize(0)
    assert pools.nbytes == memory.minimum_bytes(pools.source.tables, pools.top_k)
    model(mx.array([[1]]))
    pools.resize(10**12)
    assert pools.nbytes == everything
    for layer, pool in pools.layers.items():
        pools.read_back(mx.array([0]))
        pools.load(layer, range(pool.table.expert_count))
    before = pools.stats.read_backs
    mx.eval(model(mx.array([[1]])))
    assert pools.stats.read_backs == before


def test_something_may_happen_before_each_step_and_only_there(model: Any) -> None:
    calls: list[int] = []
    model.pools.on_step = lambda: calls.append(1)  # returns None: no change is asked for
    cache = make_prompt_cache(model)
    for token in TOKENS:
        mx.eval(model(mx.array([[token]]), cache=cache))
    assert len(calls) == len(TOKENS)
