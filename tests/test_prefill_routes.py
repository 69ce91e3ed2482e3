"""Routes, groups, promises and results on their own: no model, no files."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlet_mlx.promise import Promise
from swiftlet_mlx.results import Pairs, Sums, occurrences
from swiftlet_mlx.routes import Routes, groups


@st.composite
def choices(draw: Any) -> tuple[np.ndarray, int]:
    experts = draw(st.integers(1, 20))
    k = draw(st.integers(1, experts))
    n = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    return np.stack([rng.permutation(experts)[:k] for _ in range(n)]), experts


@given(choices(), st.sampled_from([1, 2, 3, 16]), st.randoms())
def test_a_layout_holds_each_pair_once_in_tiles_of_one_expert(
    made: tuple[np.ndarray, int], height: int, random: Any
) -> None:
    chosen, experts = made
    routes = Routes(chosen, experts)
    order = routes.experts
    random.shuffle(order)
    layout = routes.lay_out(order, height)
    assert layout.n_rows == len(layout.pairs) == height * len(layout.tiles)
    assert np.array_equal(layout.pairs[layout.places], np.arange(chosen.size))
    of_rows = [order[i] for i in np.repeat(layout.tiles, height)]
    assert list(dict.fromkeys(of_rows)) == order, "in the order asked for, those of one expert side by side"
    assert [int(e) for e in chosen.reshape(-1)[layout.pairs]] == of_rows, "fillers, too, are of their tile's expert"
    for expert, start, stop in zip(order, layout.starts[:-1], layout.starts[1:], strict=True):
        assert {order[i] for i in layout.tiles[start // height : stop // height]} == {expert}
        assert 0 <= stop - start - int((chosen == expert).sum()) < height


@given(st.lists(st.integers(), max_size=40), st.integers(1, 9))
def test_groups_keep_order_and_are_of_nearly_equal_length(experts: list[int], size: int) -> None:
    made = groups(experts, size)
    assert [e for group in made for e in group] == experts
    lengths = [len(group) for group in made]
    assert not lengths or (max(lengths) <= size and max(lengths) - min(lengths) <= 1)


def test_the_hottest_are_those_of_the_tail_most_used_first_then_latest() -> None:
    chosen = np.array([[0, 1]] * 50 + [[2, 3], [3, 4], [5, 3], [4, 6]])
    assert Routes(chosen, 8).hottest(4) == [3, 4, 6, 5, 2]
    assert Routes(chosen, 8).hottest(1000)[:2] == [1, 0]


@pytest.mark.parametrize("bad", [-1, 8])
def test_an_expert_outside_the_layer_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="of a layer that has 8"):
        Routes(np.array([[0, bad]]), 8)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_occurrences_split_places_so_that_no_part_repeats_a_token(tokens: list[int]) -> None:
    parts = occurrences(np.array(tokens))
    assert sorted(int(i) for part in parts for i in part) == list(range(len(tokens)))
    for part in parts:
        there = [tokens[i] for i in part]
        assert len(set(there)) == len(there)


def layer(y: mx.array, w: mx.array, shared: mx.array, h: mx.array) -> mx.array:
    """What a decoder layer does with its experts' output."""
    out = (y * w[..., None]).sum(axis=-2).astype(y.dtype)
    out = out + shared
    return h + out


def operands(dtype: mx.Dtype) -> tuple[mx.array, ...]:
    key = mx.random.split(mx.random.key(1), 4)
    shapes = [(1, 6, 3, 8), (1, 6, 3), (1, 6, 8), (1, 6, 8)]
    y, w, shared, h = (mx.random.normal(s, key=k).astype(dtype) for s, k in zip(shapes, key, strict=True))
    return y, w, shared, h


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_kept_promise_has_the_bits_of_the_layer_itself(dtype: mx.Dtype) -> None:
    y, w, shared, h = operands(dtype)
    promise = layer(Promise.of(y.shape, y.dtype), w, shared, h)
    assert isinstance(promise, Promise)
    assert (promise.shape, promise.dtype) == ((1, 6, 8), dtype)
    assert mx.array_equal(promise.kept(y), layer(y, w, shared, h))


@pytest.mark.parametrize("height", [1, 4])
@pytest.mark.parametrize("results", ["pairs", "sums"])
def test_results_put_in_the_order_of_a_layout_keep_the_promise(results: str, height: int) -> None:
    y, w, shared, h = operands(mx.float32)
    promise = layer(Promise.of(y.shape, y.dtype), w, shared, h)
    assert isinstance(promise, Promise)
    weights = promise.weights
    assert weights is not None
    chosen = np.stack([np.random.default_rng(n).permutation(7)[:3] for n in range(6)])
    layout = Routes(chosen, 7).lay_out([5, 0, 3, 6, 1, 2, 4], height)
    into: Pairs | Sums = Pairs(layout, 8, y.dtype) if results == "pairs" else Sums(layout, weights.reshape(6, 3), 8)
    flat = y.reshape(18, 8)
    for part in np.array_split(layout.pairs, 4):
        into.put(flat[mx.array(part.astype(np.uint32))])
    out = into.take(promise, 0, (1, 6, 3))
    want = layer(y, w, shared, h)
    assert mx.array_equal(out, want) if results == "pairs" else mx.abs(out - want).max() < 1e-6


def test_a_promise_lost_in_an_unforeseen_operation_shows_by_its_type() -> None:
    y, _, _, h = operands(mx.float32)
    promise = Promise.of(y.shape, y.dtype)
    for lost in (mx.sum(promise, axis=-2), promise - 1, mx.add(h, promise.sum(axis=-2)), promise + promise, promise[0]):
        assert not isinstance(lost, Promise)
        assert bool(mx.isnan(lost).all()), "what was lost must not look like a number"


@pytest.mark.parametrize("what", ["no sum", "other axis", "scalar weight", "weights for each value"])
def test_only_a_weighted_sum_over_choices_is_taken_in_parts(what: str) -> None:
    y, w, _, _ = operands(mx.float32)
    promise = Promise.of(y.shape, y.dtype)
    out = {
        "no sum": lambda: promise * w[..., None],
        "other axis": lambda: (promise * w[..., None]).sum(axis=-1),
        "scalar weight": lambda: (promise * 2).sum(axis=-2),
        "weights for each value": lambda: (promise * y).sum(axis=-2),
    }[what]()
    assert isinstance(out, Promise)
    assert out.weights is None
