"""Graphs that are built while the device still comes to the choice they need: the same answers, come what may."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import steps
from far_device import far_device
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from steps import LAYERS, check_table, checkpoints, load, same

from swiftlet_mlx import pools
from swiftlet_mlx.choice import Asked, Numbers
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.pools import Pools
from swiftlet_mlx.slots import SlotPool

TOKENS = [1, 5, 9, 42, 7, 99, 3, 17, 64, 2, 88, 51]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return checkpoints(tmp_path_factory)


@pytest.fixture
def folder(folders: Callable[[str], Path]) -> Path:
    return folders("qwen3_next")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine waits long for its reads: that is not to decide what these tests see."""
    monkeypatch.setattr(pools, "LONG_SECONDS", float("inf"))


def decode(model: Any) -> list[np.ndarray]:
    return steps.decode(model, TOKENS)


def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Until they are written, slot numbers name one slot only: evaluated too early, an answer is wrong."""
    built: list[int] = []
    lookup = SlotPool.lookup_later

    def poisoned(pool: SlotPool, shape: tuple[int, ...]) -> mx.array:
        array = lookup(pool, shape)
        pool._numbers[shape].write([0] * array.size)
        built.append(pool.table.layer)
        return array

    monkeypatch.setattr(SlotPool, "lookup_later", poisoned)
    return built


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe", "qwen3_moe"])
def test_every_layer_chooses_later_and_answers_as_stock(
    folders: Callable[[str], Path], kind: str, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decode(load_model(folders(kind))[0])
    built = poison(monkeypatch)
    for slots in (2, 3, 7):
        with far_device() if far else nullcontext():
            model = load(folders(kind), slots)
        before = model.pools.stats.copy()
        assert same(decode(model), expected)
        assert built == [*model.pools.layers] * len(TOKENS)
        assert model.pools.stats.since(before).read_backs == len(built), "one host synchronisation a layer"
        assert model.pools._later is None
        built.clear()
        model.pools.close()


def test_a_pool_that_cannot_hold_a_tokens_choice_does_not_choose_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = poison(monkeypatch)
    model = load(folder, 1)
    assert same(decode(model), decode(load_model(folder)[0]))
    assert not built
    model.pools.close()


def test_nothing_is_built_ahead_where_a_script_owns_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = poison(monkeypatch)
    model = load(folder, 3)
    model.pools.alone = False
    assert same(decode(model), decode(load_model(folder)[0]))
    assert not built
    model.pools.close()


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_choose_later_mix_with_others(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that take their time and leave garbage until they are done, with and without guesses."""
    chance = random.Random(seed)
    may, read = Pools.may_choose_later, None
    monkeypatch.setattr(Pools, "may_choose_later", lambda *given: chance.random() < 0.6 and may(*given))
    poison(monkeypatch)
    model, plain = load(folder, 3), load_model(folder)[0]
    read = model.pools.source.read

    def slow(layer: int, first: int, rows: Any) -> int:
        for row in rows:
            for view in row:
                view[:] = b"\x7f" * len(view)
        time.sleep(0.002 * chance.random())
        return int(read(layer, first, rows))

    model.pools.source.read = slow
    model.pools.foresight = lambda: seed % 2 == 1
    assert same(decode(model), decode(plain))
    ids = mx.array([[3], [4]])  # a batch chooses later, too, if its experts find room
    assert np.array_equal(np.array(model(ids)), np.array(plain(ids)))
    model.pools.close()


def test_sequences_in_turn_and_evaluated_last_keep_their_own_experts(folder: Path) -> None:
    model, plain = load(folder, 2), load_model(folder)[0]
    answers = {}
    for m in (model, plain):
        caches = [make_prompt_cache(m) for _ in range(3)]
        outs = [m(mx.array([[token + n]]), cache=c) for token in TOKENS[:4] for n, c in enumerate(caches)]
        mx.eval(outs)
        answers[m is model] = [np.array(out) for out in outs]
    assert same(answers[True], answers[False])
    model.pools.close()


@pytest.mark.parametrize("fails_at", range(1, 12, 3))
def test_a_read_that_fails_ends_the_step_and_harms_no_later_one(
    folder: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, 2)
    read, n = model.pools.source.read, 0

    def fails(*given: Any) -> int:
        nonlocal n
        n += 1
        if n == fails_at:
            raise ReadFailed("broken")
        return int(read(*given))

    model.pools.source.read = fails
    with pytest.raises(ReadFailed, match="broken"):
        decode(model)
    assert model.pools._later is None
    assert same(decode(model), decode(load_model(folder)[0]))
    check_table(model)
    model.pools.close()


def test_a_recorder_hears_of_every_choice_in_order(folder: Path) -> None:
    heard: dict[bool, list[tuple[int, list[int]]]] = {}
    for alone in (False, True):
        model = load(folder, 3)
        model.pools.alone = alone
        heard[alone] = []
        model.pools.recorder = lambda layer, experts, to=heard[alone]: to.append((layer, experts))
        decode(model)
        model.pools.close()
    assert heard[True] == heard[False]
    assert len(heard[True]) == LAYERS * len(TOKENS)


@pytest.mark.parametrize("far", [False, True])
def test_numbers_written_after_a_graph_was_built_are_the_ones_it_uses(far: bool) -> None:
    numbers = Numbers((1, 2), far)
    taken = mx.arange(10)[numbers.array] + 1
    numbers.write([7, 3])
    assert taken.tolist() == [[8, 4]]


@pytest.mark.parametrize("far", [False, True])
def test_what_is_asked_comes_back_flat(far: bool) -> None:
    arrays = [mx.array([[[5, 63, 0]]], mx.uint32), mx.arange(40, dtype=mx.uint32)]
    asked = Asked(arrays, 64, far)
    mx.eval(*asked.lazy)
    assert asked.numbers() == [[5, 63, 0], list(range(40))]
