"""Budgets: to the byte, refused with the minimum named, split evenly; the machine's own limits believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlet_mlx import memory
from swiftlet_mlx.errors import BudgetTooSmall
from swiftlet_mlx.qpack import LayerTable, make_table


def make_tables(shapes: list[tuple[int, int]]) -> dict[int, LayerTable]:
    """Layers of (experts, bytes an expert)."""
    return {n: make_table(n, count, {"fc1.weight": ("U8", (size,))}) for n, (count, size) in enumerate(shapes)}


SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5000)), min_size=1, max_size=8)


@given(SHAPES, st.integers(1, 10), st.floats(0, 1.2))
def test_a_split_costs_no_byte_more_than_its_budget_and_wastes_no_slot(
    shapes: list[tuple[int, int]], top_k: int, part: float
) -> None:
    tables = make_tables(shapes)
    least = memory.minimum_bytes(tables, top_k)
    everything = sum(t.expert_count * t.payload_bytes for t in tables.values())
    budget = max(least, int(part * everything))
    slots = memory.split(tables, budget, top_k)
    cost = sum(slots[n] * t.payload_bytes for n, t in tables.items())
    assert cost <= budget
    assert all(1 <= slots[n] <= t.expert_count for n, t in tables.items())
    wanting = [t.payload_bytes for n, t in tables.items() if slots[n] < t.expert_count]
    assert not wanting or budget - cost < min(wanting), "a slot would have fitted"
    if len(set(shapes)) == 1:
        assert max(slots.values()) - min(slots.values()) <= 1


@given(SHAPES, st.integers(1, 10))
def test_a_budget_below_the_minimum_names_one_that_works(shapes: list[tuple[int, int]], top_k: int) -> None:
    tables = make_tables(shapes)
    least = memory.minimum_bytes(tables, top_k)
    with pytest.raises(BudgetTooSmall) as caught:
        memory.split(tables, least - 1, top_k)
    named = float(str(caught.value).split("--cache-gb ")[1].split(",")[0])
    memory.split(tables, round(named * memory.GB), top_k)
    assert round(named * memory.GB) < 1.2 * least + 10


def test_layers_with_small_experts_leave_their_share_to_the_others() -> None:
    tables = make_tables([(4, 10), (100, 1000)])
    slots = memory.split(tables, 50_040, top_k=2)
    assert slots == {0: 4, 1: 50}
