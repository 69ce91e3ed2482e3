"""Growing while it helps, giving back under pressure: decided on numbers, driven by real steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import make_checkpoint

from swiftlet_mlx import governor, memory
from swiftlet_mlx.governor import CALM_SECONDS, PAUSE_SECONDS, Governor, Relief, Search, Watcher
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.machine import Pressure
from swiftlet_mlx.stats import Stats


def grow(search: Search, cost: Callable[[int], tuple[float, float]], windows: int = 60) -> list[int]:
    """Sizes taken while each window costs (step seconds, of which waiting)."""
    sizes = [search.size]
    for _ in range(windows):
        sizes.append(search.judge(*cost(search.size)))
    return sizes


@pytest.mark.parametrize("best", [150, 300, 700])
def test_growth_ends_near_the_size_where_the_page_cache_does_better(best: int) -> None:
    def cost(size: int) -> tuple[float, float]:  # fewer misses up to `best`, then every miss is dearer
        wait = 100 / min(size, best) * (1 + 3 * max(0, size - best) / best)
        return 0.2 + wait, wait

    search = Search(100, 10_000, 100)
    assert best / 1.3 <= grow(search, cost)[-1] <= best * 1.3
    assert search.settled


def test_growth_goes_to_the_ceiling_while_it_helps_and_not_beyond() -> None:
    assert max(grow(Search(100, 1000, 100), lambda size: (100 / size, 100 / size))) == 1000


def test_nothing_grows_where_nothing_is_waited_for() -> None:
    assert grow(Search(100, 1000, 400), lambda size: (1.0, 0.01)) == [400] * 61


def test_noise_moves_the_size_within_its_bounds_and_it_settles() -> None:
    rng = random.Random(0)
    for _ in range(50):
        search = Search(100, 1000, 200)
        sizes = grow(search, lambda size: (rng.uniform(0.5, 1.5), rng.uniform(0, 0.5)))
        assert all(100 <= s <= 1000 for s in sizes)
        assert search.settled


def test_a_step_is_judged_without_prompts_and_pauses_between() -> None:
    seen: list[tuple[float, float]] = []
    search: Any = SimpleNamespace(settled=False, size=7, judge=lambda step, wait: (seen.append((step, wait)), 9)[1])
    asked: list[int | None] = []
    stats, now = Stats(), [0.0]
    measure = Governor(stats, search, clock=lambda: now[0])
    for n in range(2 * governor.WINDOW + 1):
        asked.append(measure())
        now[0] += 60.0 if n % 10 == 5 else 0.1  # the user thinks, a prompt is read
        stats.wait_seconds += 20.0 if n % 10 == 5 else 0.04
    assert len(seen) == 1
    assert seen[0] == (pytest.approx(0.1), pytest.approx(0.04))
    assert [size for size in asked if size is not None] == [9]


# ---- pressure ------------------------------------------------------------------------------------------------------


def test_pressure_lowers_at_once_and_calm_raises_slowly() -> None:
    relief, size, wanted, now = Relief(100), 1000, 1000, 0.0
    sizes = []
    for second in range(400):
        grade = Pressure.CRITICAL if second < 3 else Pressure.WARNING if second < 12 else Pressure.NORMAL
        limit = relief.judge(grade, size, now)
        size = wanted if limit is None else min(wanted, limit)
        sizes.append(size)
        now += 1.0
    assert sizes[0] == 500
    assert min(sizes) >= 100
    assert sizes[11] < 500
    assert sizes[12 + int(CALM_SECONDS) - 2] == sizes[11], "not before it has been calm for a while"
    rising = sizes[12 + int(CALM_SECONDS) :]
    assert all(b <= 1.12 * a for a, b in pairwise(rising))
    assert sizes[-1] == 1000
    assert relief.limit is None


def test_lasting_pressure_ends_at_the_floor_and_changes_no_faster_than_its_pause() -> None:
    relief, size, changes = Relief(300), 1000, []
    for second in range(100):
        limit = relief.judge(Pressure.CRITICAL, size, float(second))
        if limit is not None and limit != size:
            changes.append(second)
            size = limit
    assert size == 300
    assert all(b - a >= PAUSE_SECONDS for a, b in pairwise(changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("governor") / "model", kind="qwen3_moe", bits=4)


def test_the_watcher_lowers_a_models_pools_and_answers_stay(folder: Path) -> None:
    model: Any = load_streamed(folder, cache_gb=1.0)[0]
    stock: Any = load_model(folder)[0]
    pools = model.pools
    full = pools.nbytes
    grade = [Pressure.NORMAL]
    watcher = Watcher(pools, full // 4, read=lambda: grade[0], seconds=0.001)
    caches = make_prompt_cache(model), make_prompt_cache(stock)
    sizes = set()
    for token in range(60):
        if token == 5:
            grade[0] = Pressure.CRITICAL
            time.sleep(0.05)
        x = mx.array([[token]])
        assert mx.array_equal(model(x, cache=caches[0]), stock(x, cache=caches[1])).item()
        sizes.add(pools.nbytes)
    watcher.close()
    assert max(sizes) == full
    assert full // 4 * 0.8 <= min(sizes) <= full // 2
    pools.limit(None)
    pools.apply()
    assert pools.nbytes == full
    pools.close()


def test_an_idle_owner_is_told_to_apply_the_limit(folder: Path) -> None:
    model: Any = load_streamed(folder, cache_gb=1.0)[0]
    called: list[int] = []
    watcher = Watcher(model.pools, 1, apply=lambda: called.append(1), read=lambda: Pressure.WARNING, seconds=0.001)
    for _ in range(1000):
        if called:
            break
        time.sleep(0.002)
    watcher.close()
    assert called
    model.pools.close()


def test_an_automatic_pool_grows_from_half_to_what_the_plan_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "WINDOW", 3)
    monkeypatch.setattr(governor, "IDLE", -1.0)
    monkeypatch.setattr(governor, "WORTH", -1e9)  # on this machine of noise every growth counts as a help
    probe: Any = load_streamed(folder, cache_gb=1.0)[0]
    rest = probe.pools.plan
    room = rest.dense + rest.kv_cache + rest.prefill + rest.mlx_cache + rest.process + rest.experts * 0.8
    monkeypatch.setattr(memory, "available_bytes", lambda: int(room / (1 - memory.OTHERS_SHARE)))
    model: Any = load_streamed(folder)[0]
    plan = model.pools.plan
    assert plan.cycle < plan.pool < plan.experts
    assert model.pools.nbytes <= max(plan.pool // 2, 2 * plan.cycle) < 0.7 * plan.pool
    cache, sizes = make_prompt_cache(model), []
    for token in range(60):
        mx.eval(model(mx.array([[token]]), cache=cache))
        sizes.append(model.pools.nbytes)
    assert sizes == sorted(sizes)
    assert plan.pool - 2 * max(t.payload_bytes for t in probe.pools.source.tables.values()) <= sizes[-1] <= plan.pool
    probe.pools.close()
    model.pools.close()
