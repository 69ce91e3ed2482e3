"""The hot list: kept from run to run, and never more than a hint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from tiny import make_checkpoint

from swiftlet_mlx import warm
from swiftlet_mlx.loader import load_streamed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("warm") / "model", bits=4)


def run(model: Any, tokens: range) -> list[mx.array]:
    cache, out = make_prompt_cache(model), []
    for token in tokens:
        out.append(model(mx.array([[token]]), cache=cache))
        mx.eval(out[-1])
    return out


def test_the_next_start_finds_its_experts_read(folder: Path, tmp_path: Path) -> None:
    name = warm.model_hash(folder)
    first: Any = load_streamed(folder, cache_gb=0.00008)[0]
    expected = run(first, range(20))
    warm.write(tmp_path / "hot" / "list.json", name, warm.learned(first.pools, {}))
    cold = first.pools.stats.misses
    first.pools.close()

    second: Any = load_streamed(folder, cache_gb=0.00008)[0]
    warm.start(second.pools, warm.read(tmp_path / "hot" / "list.json", name))
    second.pools._threads.drain()
    while second.pools._threads._idling.locked():
        pass
    got = run(second, range(20))
    assert all(mx.array_equal(a, b).item() for a, b in zip(got, expected, strict=True))
    assert second.pools.stats.misses < cold
    for layer, pool in first.pools.layers.items():
        hottest = sorted(pool.policy.uses, key=lambda e: -pool.policy.uses[e])[0]
        assert second.pools.layers[layer].policy.uses[hottest] == pool.policy.uses[hottest]
    second.pools.close()


def test_old_habits_fade() -> None:
    pool = SimpleNamespace(policy=SimpleNamespace(uses={1: 5, 2: 1}))
    pools: Any = SimpleNamespace(layers={0: pool})
    assert warm.learned(pools, {0: {1: 4, 7: 9, 8: 1}, 3: {1: 1}}) == {0: {1: 7, 2: 1, 7: 4}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version": 1}',
        b'{"version": 1, "model": "m", "uses": [1]}',
        b'{"version": 1, "model": "m", "uses": {"x": {"1": 1}}}',
        b'{"version": 1, "model": "m", "uses": {"0": {"1": "many"}}}',
        b'{"version": 1, "model": "m", "uses": {"0": null}}',
        b'{"version": 2, "model": "m", "uses": {"0": {"1": 1}}}',
        b'{"version": 1, "model": "other", "uses": {"0": {"1": 1}}}',
        b"[" * 100_000,
        b"\xff\xfe",
        b" " * (warm.MAX_BYTES + 1),
    ],
)
def test_a_list_that_is_no_list_of_this_model_is_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hot").write_bytes(content)
    assert warm.read(tmp_path / "hot", "m") == {}
    assert warm.read(tmp_path / "missing", "m") == {}


USES = st.dictionaries(
    st.integers(0, 90), st.dictionaries(st.integers(0, 500), st.integers(1, 10**9), max_size=9), max_size=9
)


@given(USES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, uses: warm.Uses) -> None:
    path = tmp_path_factory.getbasetemp() / "hot.json"
    warm.write(path, "m", uses)
    assert warm.read(path, "m") == uses


def test_the_file_is_bounded_and_no_half_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    warm.write(path, "m", {n: {e: 10**6 + e for e in range(512)} for n in range(94)})
    assert path.stat().st_size < warm.MAX_BYTES
    assert len(json.loads(path.read_bytes())["uses"]["0"]) == warm.PER_LAYER
    assert min(warm.read(path, "m")[3]) == 512 - warm.PER_LAYER, "the busiest are kept"
    assert [p.name for p in tmp_path.iterdir()] == ["hot.json"]


def test_experts_a_model_does_not_have_are_ignored(folder: Path) -> None:
    model: Any = load_streamed(folder, cache_gb=0.00008)[0]
    warm.start(model.pools, {0: {99: 5, -1: 4, 3: 1}, 77: {0: 1}})
    model.pools.read_back(mx.array([0]))
    assert model.pools.layers[0].policy.residents <= {3}
    model.pools.close()


def test_another_models_bytes_have_another_name(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", bits=8)
    assert warm.model_hash(folder) == warm.model_hash(folder) != warm.model_hash(other)
