"""Reading ahead on a guess: right, wrong, failed or broken off, it never changes an answer nor loses a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import steps
from far_device import far_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from steps import check_table, checkpoints, same

from swiftlet_mlx import pools
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.governor import AGAIN, PAYS, TURN, TURNS, Trial
from swiftlet_mlx.moe import Router, Streamed, foresee
from swiftlet_mlx.prefill import prefill
from swiftlet_mlx.slots import EMPTY
from swiftlet_mlx.stats import Stats

TOKENS = [1, 5, 9, 42, 7, 99, 3, 17, 64, 2, 88, 51, 5, 9, 1, 42]
KINDS = ["qwen3_next", "qwen3_5_moe", "qwen3_moe"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return checkpoints(tmp_path_factory)


@pytest.fixture(scope="module")
def folder(folders: Callable[[str], Path]) -> Path:
    return folders("qwen3_next")


@pytest.fixture(scope="module")
def stock(folder: Path) -> list[np.ndarray]:
    return decode(load_model(folder)[0])


def load(folder: Path, slots: int) -> Any:
    model = steps.load(folder, slots)
    model.pools.foresight = lambda: True
    return model


def decode(model: Any, tokens: list[int] = TOKENS) -> list[np.ndarray]:
    return steps.decode(model, tokens)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_stock(folders: Callable[[str], Path], kind: str, far: bool) -> None:
    folder = folders(kind)
    expected = decode(load_model(folder)[0])
    for slots in (1, 2, 3, 7):
        with far_device() if far else nullcontext():
            model = load(folder, slots)
        assert same(decode(model), expected)
        stats = model.pools.stats
        if slots in (2, 3):
            assert stats.guessed >= stats.foreseen > 0
        assert stats.reads >= stats.misses - stats.foreseen
        model.pools.close()


def test_layers_that_hold_all_their_experts_are_not_guessed_for(folder: Path, stock: list[np.ndarray]) -> None:
    model = load(folder, 8)
    assert same(decode(model), stock)
    assert model.pools.stats.guessed == 0
    model.pools.close()


def test_only_wrong_guesses_cost_reads_and_nothing_else(folder: Path, stock: list[np.ndarray]) -> None:
    model = load(folder, 3)
    last: list[mx.array] = []

    class Contrary(Router):
        """Names the experts that a router wants least."""

        def choice(self, x: mx.array) -> mx.array:
            last.append(x)
            return mx.argpartition(self.block.gate(x), kth=self.top_k, axis=-1)[..., : self.top_k]

    for module in model.modules():
        if isinstance(module, Streamed) and module.following is not None:
            router = module.following
            object.__setattr__(module, "following", Contrary(router.layer, router.block, router.top_k))
    assert same(decode(model), stock)
    assert last
    assert model.pools.stats.guessed > 3 * model.pools.stats.foreseen
    check_table(model)
    model.pools.close()


def test_guesses_are_made_with_the_router_the_model_has(folder: Path) -> None:
    """The one it was built with is replaced when the model is quantized."""
    model = load(folder, 3)
    blocks = {c.layer: b for _, b in model.named_modules() for c in b.children().values() if isinstance(c, Streamed)}
    x = mx.random.normal((1, 1, 64), key=mx.random.key(3))
    for layer in range(3):
        gate = blocks[layer + 1].gate
        assert isinstance(gate, nn.QuantizedLinear)
        guess = blocks[layer].switch_mlp._guess(x)
        assert guess.layer == layer + 1
        assert set(guess.experts.flatten().tolist()) == set(mx.argsort(gate(x)).flatten()[-2:].tolist())
    for other in (nn.Linear(32, 8), nn.Linear(32, 8).to_quantized(32, 8), nn.Sequential(blocks[1].gate)):
        blocks[1].gate = other
        assert blocks[0].switch_mlp._guess(x) is None, "nothing is guessed with what does not fit"
    model.pools.close()


@pytest.mark.parametrize("far", [False, True])
def test_a_guess_left_of_a_step_that_failed_is_not_read_beside_another_layer(
    folder: Path, stock: list[np.ndarray], far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with far_device() if far else nullcontext():
        model = load(folder, 3)
    object.__setattr__(model, "built", None)  # as of a model of which nothing is known: its steps are no graph
    pools, read = model.pools, model.pools.source.read
    for failing in range(3):
        for token in TOKENS[:4]:

            def fails(layer: int, first: int, rows: Any, failing: int = failing) -> Any:
                if layer == failing:
                    raise ReadFailed("a bad block")
                return read(layer, first, rows)

            for pool in pools.layers.values():  # so that each layer has something to read
                while pool.policy.residents:
                    e = pool.policy.evict()
                    pool._free.append(pool.slots[e])
                    pool.slots[e] = EMPTY
                    pool.complete = False
            pools.source.read = fails
            with pytest.raises(ReadFailed):
                model(mx.array([[token]]))
            pools.source.read = read
            begin = pools.begin

            def begins(pool: Any, experts: Any, begin: Any = begin) -> Any:
                assert pools._ahead is None or pools._ahead.pool is pool
                return begin(pool, experts)

            monkeypatch.setattr(pools, "begin", begins)
            assert same(decode(model, TOKENS[:3]), stock[:3])
            monkeypatch.setattr(pools, "begin", begin)
            pools.wait()
            check_table(model)
    pools.close()


def test_what_is_on_its_way_on_a_guess_is_given_no_second_slot_in_the_background(folder: Path) -> None:
    model = load(folder, 7)
    pools = model.pools
    (pool, *_) = pools.layers.values()
    while pool.policy.residents:  # free slots are what the background fills
        e = pool.policy.evict()
        pool._free.append(pool.slots[e])
        pool.slots[e] = EMPTY
    pools._read_ahead(pool, [2, 5])
    assert pools._ahead is not None
    pools.prefetch({pools.first: [5, 2, 1]})
    pools.prefetch({pools.first: [5, 2, 1]})
    pools.read_back(mx.array([1]))
    assert {2, 5} <= pool.policy.residents
    check_table(model)
    pools.close()


def test_what_was_read_ahead_is_read_once(folder: Path) -> None:
    model = load(folder, 7)
    reads: list[tuple[int, int]] = []
    read = model.pools.source.read
    model.pools.source.read = lambda layer, first, rows: (reads.append((layer, first)), read(layer, first, rows))[1]
    before = model.pools.stats.copy()
    decode(model, TOKENS[:1])
    done = model.pools.stats.since(before)
    assert len(reads) == len(set(reads)) == done.reads == done.misses + done.guessed - done.foreseen
    model.pools.close()


@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_a_failed_guess_is_an_error_only_where_it_was_right(
    folder: Path, stock: list[np.ndarray], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, 3)
    read, calls = model.pools.source.read, 0

    def fails(layer: int, first: int, rows: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            for row in rows:
                for view in row:
                    view[:] = b"\xff" * len(view)
            raise ReadFailed("a bad block")
        return read(layer, first, rows)

    for _ in range(4):
        monkeypatch.setattr(model.pools.source, "read", fails)
        try:
            assert same(decode(model), stock)
        except ReadFailed:
            pass
        monkeypatch.setattr(model.pools.source, "read", read)
        assert same(decode(model), stock)
        check_table(model)
    model.pools.close()


@pytest.mark.parametrize("calls", range(1, 30, 4))
def test_a_step_broken_off_anywhere_leaves_a_usable_model(
    folder: Path, stock: list[np.ndarray], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "SMALL_BYTES", 0)  # or some are read without being asked for
    model = load(folder, 3)
    threads, post, n = model.pools._threads, model.pools._threads.post, 0

    def broken_off(*given: Any) -> None:
        nonlocal n
        n += 1
        if n == calls:
            raise KeyboardInterrupt
        post(*given)

    monkeypatch.setattr(threads, "post", broken_off)
    with pytest.raises(KeyboardInterrupt):
        decode(model)
    assert same(decode(model), stock)
    check_table(model)
    model.pools.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.sampled_from(["ahead", "not", "smaller", "larger", "prompt", "engine", "script"]), min_size=4, max_size=12
    ),
    slots=st.integers(1, 7),
)
def test_any_course_of_things_gives_the_answers_of_stock(walked: tuple[Any, Any], steps: list[str], slots: int) -> None:
    model, plain = walked
    pools = model.pools
    size = sum(pool.table.payload_bytes for pool in pools.layers.values())
    pools.resize(slots * size)
    own, cache = make_prompt_cache(model), make_prompt_cache(plain)
    for n, step in enumerate(steps):
        if step in ("ahead", "not"):
            pools.foresight = lambda step=step: step == "ahead"
        elif step in ("smaller", "larger"):
            pools.ask_for(size * (2 if step == "smaller" else 6))
        elif step == "prompt":
            tokens = TOKENS[: 3 + n]
            prefill(model, tokens, own)
            plain(mx.array([tokens]), cache=cache)
        else:
            pools.alone = step == "engine"
        token = mx.array([[TOKENS[n]]])
        assert np.array_equal(np.array(model(token, cache=own)), np.array(plain(token, cache=cache)))
    pools.wait()
    check_table(model)


@pytest.fixture(scope="module")
def walked(folder: Path) -> Iterator[tuple[Any, Any]]:
    model = load(folder, 3)
    yield model, load_model(folder)[0]
    model.pools.close()


def test_routers_that_are_no_plain_product_are_left_alone(folder: Path) -> None:
    model = load(folder, 3)
    assert foresee(model, 2) == 3
    for block in (m for m in model.modules() if "gate" in m.children()):
        block.gate = nn.Sequential(block.gate)
    for module in model.modules():
        if isinstance(module, Streamed):
            object.__setattr__(module, "following", None)
    assert foresee(model, 2) == 0
    assert foresee(model, 0) == 0
    model.pools.close()


# ---- whether it pays -----------------------------------------------------------------------------------------------


def run(seconds: Callable[[bool], float], wait: float, steps: int, ready: Callable[[], bool] = lambda: True) -> Any:
    """A trial over steps that last as long as `seconds` says. Returns it and what it decided for each step."""
    stats, now = Stats(), 0.0
    trial = Trial(stats, ready, lambda: now)
    said = []
    for _ in range(steps):
        said.append(trial())
        now += seconds(said[-1])
        stats.wait_seconds += wait
    return trial, said


def test_reading_ahead_is_kept_where_it_wins_every_turn() -> None:
    trial, said = run(lambda ahead: 0.9 if ahead else 1.0, 0.3, 2 * TURNS * TURN + 500)
    assert trial.pays
    assert all(said[-400:])
    assert sum(said[: 2 * TURNS * TURN]) in range(TURNS * TURN - 1, TURNS * TURN + 2)


@pytest.mark.parametrize("gain", [0.5 * PAYS, 0.0, -0.1])
def test_it_is_left_out_where_it_does_not(gain: float) -> None:
    trial, said = run(lambda ahead: 1.0 - gain if ahead else 1.0, 0.3, 2 * TURNS * TURN + 500)
    assert not trial.pays
    assert not any(said[-400:])


def test_it_is_not_even_tried_where_nothing_is_waited_for() -> None:
    trial, said = run(lambda ahead: 0.5 if ahead else 1.0, 0.01, 3 * TURN)
    assert not trial.pays
    assert not any(said)


def test_it_is_not_tried_before_step_times_mean_anything_and_tried_again_later() -> None:
    assert not any(run(lambda ahead: 1.0, 0.5, 3 * TURN, lambda: False)[1])
    _, said = run(lambda ahead: 1.1 if ahead else 1.0, 0.3, AGAIN + 4 * TURNS * TURN)
    assert any(said[AGAIN:])


def test_one_slow_turn_among_them_is_not_enough() -> None:
    turns = iter([1.0, 0.9, 1.0, 1.1, 1.0, 0.9])
    now: dict[str, Any] = {"n": 0, "cost": next(turns)}

    def seconds(ahead: bool) -> float:
        now["n"] += 1
        if now["n"] % TURN == 0:
            now["cost"] = next(turns, 1.0)
        return float(now["cost"])

    assert not run(seconds, 0.3, 2 * TURNS * TURN + 10)[0].pays
