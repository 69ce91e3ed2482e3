"""Prefill on a device with memory of its own that does everything as late as it may: the same bits as stock mlx-lm.

What was launched, moves into slots included, runs in its order, but not before the host waits for something. Whatever
the host overwrites without having waited is then used overwritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from far_device import far_device
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import make_checkpoint

from swiftlet_mlx import cuda, expert_pass
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.prefill import prefill

LAYERS, EXPERTS = 3, 16
TOKENS = [int(i) for i in np.random.default_rng(3).integers(0, 128, 61)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("far") / "model", kind="qwen3_moe", bits=4,
        shape={"layers": LAYERS, "experts": EXPERTS, "top_k": 3},
    )  # fmt: skip


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The device. Gives what has been launched and has not run."""
    launched: list[tuple[mx.array | None, Callable[[], Any]]] = []
    moved: list[mx.array] = []
    evaluate = mx.eval

    def wait(*arrays: Any) -> None:
        last = arrays[0] if len(arrays) == 1 and any(arrays[0] is a for a in moved) else None
        while launched and (last is None or any(last is a for a, _ in launched)):
            launched.pop(0)[1]()  # a wait for a move is one for what comes before it, and for no more
        evaluate(*arrays)

    with far_device():
        made = cuda._kernel

        def kernel(sizes: tuple[int, ...], unit: int) -> Callable[..., Any]:
            move = made(sizes, unit)

            def later(**given: Any) -> list[mx.array]:
                moved.append(mx.zeros(1, mx.uint32))
                launched.append((moved[-1], lambda: move(**given)))
                return moved[-1:]

            return later

        monkeypatch.setattr(cuda, "_kernel", kernel)
        monkeypatch.setattr(mx, "eval", wait)

        def launch(*arrays: Any) -> None:
            # as they are now: one that is assigned to later is another array then
            if len(arrays) == 1 and any(arrays[0] is a for a in moved):
                return
            now = [mx.stop_gradient(a) for _, a in tree_flatten(arrays) if isinstance(a, mx.array)]
            launched.append((None, lambda: evaluate(now)))

        monkeypatch.setattr(mx, "async_eval", launch)
        monkeypatch.setattr(mx, "synchronize", lambda: None)
        yield launched


def load(folder: Path, slots: int) -> Any:
    model: Any = load_streamed(folder, cache_gb=1.0, threads=3)[0]
    model.pools.resize(sum(slots * pool.table.payload_bytes for pool in model.pools.layers.values()))
    for pool in model.pools.layers.values():
        while pool.policy.residents:
            expert = pool.policy.evict()
            pool.settle(expert, pool.slots[expert], ok=False)
            pool.slots[expert] = 0xFFFFFFFF
    mx.eval()
    return model


def same(want: list[Any], got: list[Any]) -> bool:
    return all(
        np.array_equal(np.array(a), np.array(b))
        for c, d in zip(want, got, strict=True)
        for a, b in zip(c.keys_and_values(), d.keys_and_values(), strict=True)
    )


@pytest.mark.parametrize("height", [1, 4])
@pytest.mark.parametrize("slots", [3, 5, 9, 16])
def test_a_prompt_equals_stock_and_each_expert_is_read_once(
    folder: Path, late: list[Any], slots: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_pass, "tile_height", lambda rows, slots: height)
    plain, model = load_model(folder)[0], load(folder, slots)
    want, got = make_prompt_cache(plain), make_prompt_cache(model)
    for a, b in ((0, 40), (40, 60)):  # the second with the pool that the first left
        mx.eval(plain(mx.array([TOKENS[a:b]]), cache=want))
        before = model.pools.stats.copy()
        prefill(model, TOKENS[a:b], got)
        done = model.pools.stats.since(before)
        assert done.read_bytes == done.misses * model.pools.layers[0].table.payload_bytes
        assert done.misses + done.hits <= EXPERTS * (LAYERS - 1)
        assert same(want, got)
    last = mx.array([TOKENS[60:]])
    logits = [plain(last, cache=want), model(last, cache=got)]
    mx.eval(logits)
    assert np.array_equal(np.array(logits[0]), np.array(logits[1]))
    model.pools.close()


def test_a_group_has_all_slots_and_the_host_waits_for_no_product(folder: Path, late: list[Any]) -> None:
    model = load(folder, 4)
    groups: Counter[int] = Counter()
    still: list[int] = []
    filled = type(model.pools.layers[0]).filled

    def noted(pool: Any, slots: list[int], rows: Any = None) -> Any:
        groups[len(slots)] += 1
        still.append(len(late))
        return filled(pool, slots, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.pools.layers[0]), "filled", noted)
        prefill(model, TOKENS, make_prompt_cache(model))
    assert max(groups) == 4
    assert sum(groups.values()) <= (LAYERS - 1) * (EXPERTS // 4 + 1)
    assert still.count(0) < len(still) / 2, "products are under way when the next group is moved in"
    model.pools.close()


@pytest.mark.parametrize("fail_at", [1, 7, 14])
def test_a_failed_read_costs_no_slot_and_nothing_of_it_gets_there(
    folder: Path, late: list[Any], fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = load_model(folder)[0], load(folder, 5)
    read, count = model.pools.source.read, 0

    def fails(layer: int, first: int, rows: Any) -> int:
        nonlocal count
        count += 1
        if count >= fail_at:
            raise ReadFailed("no such luck")
        return int(read(layer, first, rows))

    want, got = make_prompt_cache(plain), make_prompt_cache(model)
    monkeypatch.setattr(model.pools.source, "read", fails)
    with pytest.raises(ReadFailed):
        prefill(model, TOKENS, got)
    monkeypatch.setattr(model.pools.source, "read", read)
    for pool in model.pools.layers.values():
        assert len(pool.policy.residents) + pool.n_free == pool.n_slots
    mx.eval(plain(mx.array([TOKENS]), cache=want))
    prefill(model, TOKENS, got)
    assert same(want, got)
    model.pools.close()


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [2, 3, 5, 6])
def test_breaking_off_leaves_pool_and_caches_usable(folder: Path, late: list[Any], at: int) -> None:
    plain, model = load_model(folder)[0], load(folder, 5)
    want, got = make_prompt_cache(plain), make_prompt_cache(model)
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise Stop

    with pytest.raises(Stop):
        prefill(model, TOKENS, got, progress=stop)
    for pool in model.pools.layers.values():
        assert len(pool.policy.residents) + pool.n_free == pool.n_slots
    mx.eval(plain(mx.array([TOKENS[:20]]), cache=want))
    prefill(model, TOKENS[:20], got)
    assert same(want, got)
    model.pools.close()
