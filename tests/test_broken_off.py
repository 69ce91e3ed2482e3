"""Ctrl-C at any line of the code that hands out slots: none is lost, none holds another expert than the table says."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Set
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from far_device import far_device
from mlx_lm.models.cache import make_prompt_cache
from test_pools import Source
from tiny import make_checkpoint

from swiftlet_mlx import expert_pass, layer_major, moe, policy, pools, prefill, read_threads, reads, slots
from swiftlet_mlx.choice import Guess
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.pools import Pools
from swiftlet_mlx.read_threads import ReadThreads
from swiftlet_mlx.slots import EMPTY

FILES = {str(Path(module.__file__)) for module in (policy, pools, read_threads, reads, slots)}
MORE = {str(Path(module.__file__)) for module in (expert_pass, layer_major, moe, prefill)}
# (layer, its experts, what is guessed for the layer after it)
COURSE = [(0, [1, 4], [2, 5]), (1, [2, 6], [0, 7]), (2, [3, 7], None), (0, [0, 4], [5, 6]), (1, [5, 1], None)]


def interrupted(work: Callable[[], Any], after: int, files: Set[str] = FILES) -> bool:
    """Run work with Ctrl-C at the line that comes after so many lines of this thread; whether it came to that."""
    left = after

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def go(pools: Pools) -> None:
    pools.ask_for(9 * 128 if pools.nbytes > 9 * 128 else 12 * 128)  # three slots a layer, and four
    pools.before_step()
    pools.prefetch({n: [0, 1, 2] for n in pools.layers})
    for layer, experts, guess in COURSE:
        pool = pools.layers[layer]
        ahead = None if guess is None else Guess(layer + 1, mx.array([guess], mx.uint32))
        chosen = pools.choice(pool, mx.array([experts], mx.uint32), ahead)
        pools.begin(pool, chosen)
        pools.wait()


def check_free(pools: Pools) -> None:
    for pool in pools.layers.values():
        residents = {e for e, slot in enumerate(pool.slots) if slot != EMPTY}
        assert residents == pool.policy.residents
        assert sorted(key for *_, key in pool.policy._heap) == sorted(residents), "one that can never be evicted"
        assert len({pool.slots[e] for e in residents}) == len(residents), "two experts in one slot"
        assert pool.n_free == pool.n_slots - len(residents), "a slot was lost"


def check(pools: Pools) -> None:
    check_free(pools)
    for layer, pool in pools.layers.items():
        for e in pool.policy.residents:
            held = {byte for array in pool.arrays.values() for byte in array[pool.slots[e]].tolist()}
            assert held == {10 * layer + e}


@pytest.fixture(params=[0, pools.SMALL_BYTES], ids=["threads read", "whoever waits reads"])
def fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pools, "SMALL_BYTES", request.param)
    threads = ReadThreads(2)
    made = Pools(Source(), {0: 3, 1: 3, 2: 3}, threads, top_k=2)
    yield made
    made.close()


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_once_at_any_line(fresh: Pools, step: int) -> None:
    go(fresh)
    after = 1
    while interrupted(lambda: go(fresh), after):
        go(fresh)  # and does not hang
        check(fresh)
        after += step
    assert after > 300, "the lines of the course were not seen"


def test_again_and_again_while_it_recovers(fresh: Pools) -> None:
    """A second Ctrl-C finds the clearing up after the first."""
    go(fresh)
    chance = random.Random(5)
    for _ in range(60):
        interrupted(lambda: go(fresh), chance.randint(1, 250))
        for _ in range(3):
            interrupted(lambda: go(fresh), chance.randint(1, 60))
        go(fresh)
        check(fresh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("off") / "model", kind="qwen3_next", bits=4)


def answer(model: Any) -> list[np.ndarray]:
    """A prompt layer by layer, then tokens one by one."""
    cache = make_prompt_cache(model)
    return [np.array(model(mx.array([given]), cache=cache)[0, -1]) for given in (list(range(3, 40)), [7], [11])]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("times", [pytest.param(60, marks=pytest.mark.slow), 6])
def test_a_script_that_is_broken_off_in_prompt_or_answer_may_go_on(folder: Path, times: int, far: bool) -> None:
    with far_device() if far else nullcontext():
        model: Any = load_streamed(folder, cache_gb=1.0, threads=2)[0]
        model.pools.resize(sum(3 * pool.table.payload_bytes for pool in model.pools.layers.values()))
    expected = answer(model)
    chance = random.Random(3)
    n = 0
    for _ in range(times):
        n += interrupted(lambda: answer(model), chance.randint(1, 3000), FILES | MORE)
        assert all(np.array_equal(a, b) for a, b in zip(answer(model), expected, strict=True))
        check_free(model.pools)
    assert n > times // 2, "the lines were not seen"
    model.pools.close()
