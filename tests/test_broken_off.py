"""Ctrl-C at any line of the code that hands out slots: none is lost, none holds another expert than the table says."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from test_pools import Source

from swiftlet_mlx import policy, pools, read_threads, reads, slots
from swiftlet_mlx.pools import Guess, Pools
from swiftlet_mlx.read_threads import ReadThreads
from swiftlet_mlx.slots import EMPTY

FILES = {str(Path(module.__file__)) for module in (policy, pools, read_threads, reads, slots)}
# (layer, its experts, what is guessed for the layer after it)
COURSE = [(0, [1, 4], [2, 5]), (1, [2, 6], [0, 7]), (2, [3, 7], None), (0, [0, 4], [5, 6]), (1, [5, 1], None)]


def interrupted(work: Callable[[], None], after: int) -> bool:
    """Run work with Ctrl-C at the line that comes after so many lines of this thread; whether it came to that."""
    left = after

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
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


def check(pools: Pools) -> None:
    for layer, pool in pools.layers.items():
        residents = {e for e, slot in enumerate(pool.slots) if slot != EMPTY}
        assert residents == pool.policy.residents
        assert sorted(key for *_, key in pool.policy._heap) == sorted(residents), "one that can never be evicted"
        assert len({pool.slots[e] for e in residents}) == len(residents), "two experts in one slot"
        assert pool.n_free == pool.n_slots - len(residents), "a slot was lost"
        for e in residents:
            held = {byte for array in pool.arrays.values() for byte in array[pool.slots[e]].tolist()}
            assert held == {10 * layer + e}


@pytest.fixture
def fresh() -> Any:
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
