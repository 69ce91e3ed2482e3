"""Policies replayed on routes: the bound is a bound, the default is near the best, the real pools agree."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from swiftlet_bench import policy as bench

from swiftlet_mlx.policy import LFU
from swiftlet_mlx.route_file import RouteFile, RouteInfo


@pytest.mark.parametrize("slots", [4, 6, 12])
def test_nobody_beats_belady(slots: int) -> None:
    routes = bench.skewed(layers=2, experts=24, top_k=4, steps=150)
    rates = bench.hit_rates(routes, slots)
    assert max(rates.values()) == rates["Belady"]
    assert all(0 < rate < 1 for rate in rates.values())


def test_belady_is_optimal_on_small_cases() -> None:
    rng = random.Random(3)
    for _ in range(20):
        steps = [[rng.randrange(5)] for _ in range(9)]
        rates = bench.hit_rates([(0, s) for s in steps], 2)
        assert round(rates["Belady"] * 9) == best_hits([s[0] for s in steps], 2)


def best_hits(keys: list[int], n_slots: int) -> int:
    """By trying every choice."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for key in keys:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            options = [held] if key in held else [held | {key}] if len(held) < n_slots else []
            if not options:
                options = [frozenset(kept) | {key} for kept in itertools.combinations(held, n_slots - 1)]
            for option in options:
                after[option] = max(after.get(option, -1), hits + (key in held))
        states = after
    return max(states.values())


@pytest.mark.parametrize("name", [*bench.ONLINE])
def test_every_policy_keeps_its_promise(name: str) -> None:
    rng = random.Random(1)
    cache = bench.ONLINE[name]()
    for _ in range(400):
        step = rng.sample(range(12), rng.randint(1, 4))
        cache.use(step)
        for key in step:
            if key not in cache.residents:
                if len(cache.residents) == 5:
                    gone = cache.evict(step)
                    assert gone not in step
                    assert gone not in cache.residents
                cache.add(key)
        assert set(step) <= cache.residents
        assert len(cache.residents) <= 5


def test_lru_below_one_cycle_hits_nothing_and_with_it_everything() -> None:
    steps = [[n % 6] for n in range(60)]
    assert bench.replay(steps, 5, bench.LRU()) == (0, 60)
    assert bench.replay(steps, 6, bench.LRU()) == (54, 60)


def test_the_default_is_within_a_tenth_of_the_best_on_line_policy() -> None:
    routes = bench.skewed(layers=1, experts=64, top_k=4, steps=2500, topic_steps=500)
    for slots in (8, 16, 32):
        rates = bench.hit_rates(routes, slots)
        best = max(rate for name, rate in rates.items() if name != "Belady")
        assert rates["LFU, halved/2048"] > 0.9 * best
    assert isinstance(bench.ONLINE["LFU, halved/2048"](), LFU)


def test_a_recorded_file_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RouteFile(tmp_path / "routes", RouteInfo("m", (0, 1), 24, 4, 100)) as file:
        for layer, experts in bench.skewed(layers=2, experts=24, top_k=4, steps=50):
            file(layer, list(experts))
    bench.main([str(tmp_path / "routes"), "--slots", "0.25", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(bench.ONLINE)
    assert "25%" in lines[0]
