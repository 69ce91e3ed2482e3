"""Budgets: to the byte, refused with the minimum named, split evenly; the machine's own limits believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_checkpoint

from swiftlet_mlx import memory
from swiftlet_mlx.config import ModelConfig, read_config
from swiftlet_mlx.errors import BudgetTooSmall, OptionError
from swiftlet_mlx.layout import LayerTable, make_table
from swiftlet_mlx.reader import open_source
from swiftlet_mlx.units import size


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


# ---- the plan ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(opened, tables, config) of a tiny model."""
    folder = make_checkpoint(tmp_path_factory.mktemp("plan") / "model", kind="qwen3_5_moe", bits=4)
    source, opened = open_source(folder)
    source.close()
    return opened, source.tables, read_config(folder)


BIG = 100 * memory.GB


def test_auto_takes_everything_where_there_is_room(model: Any) -> None:
    plan = memory.plan(*model, available=BIG)
    assert plan.pool == plan.experts == memory.all_bytes(model[1])
    assert plan.fits
    assert not plan.asked


@given(st.integers(0, 2 * memory.GB))
def test_the_parts_of_an_automatic_plan_fit_or_the_pool_is_the_smallest(model: Any, available: int) -> None:
    plan = memory.plan(*model, available=available)
    assert plan.pool == memory.minimum_bytes(model[1], 2) or plan.process_total + plan.others <= available
    assert memory.minimum_bytes(model[1], 2) <= plan.pool <= plan.experts


def test_a_longer_context_leaves_less_for_the_pool(model: Any) -> None:
    config = {**model[2], "text_config": {**model[2]["text_config"], "num_key_value_heads": 50}}
    tight = memory.plan(model[0], model[1], config, available=BIG).process_total + 40_000_000
    short, long = (memory.plan(model[0], model[1], config, None, n, tight) for n in (100, 1000))
    per_token = 1 * 2 * 50 * 32 * 2  # one attention layer of four, keys and values, 16 bits
    assert long.kv_cache - short.kv_cache == 900 * per_token
    assert short.context_tokens == 100


def test_an_asked_pool_is_what_was_asked_to_the_byte(model: Any) -> None:
    plan = memory.plan(*model, 0.0001, available=0)
    assert plan.pool == 100_000
    assert plan.asked
    assert not plan.fits


@pytest.mark.parametrize("gb", [0, -1, float("nan"), float("inf"), 1e7])
def test_no_size_is_no_plan(model: Any, gb: float) -> None:
    with pytest.raises(OptionError, match="--cache-gb"):
        memory.plan(*model, gb, available=BIG)


def test_the_table_shows_every_part(model: Any) -> None:
    plan = memory.plan(*model, available=BIG)
    text = plan.table()
    for name, n in plan.parts():
        assert name in text
        assert size(n) in text
    assert "100 % of the experts" in text


def test_caches_of_known_models_cost_what_their_configs_say() -> None:
    qwen = {
        "model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4, "num_key_value_heads": 2,
        "head_dim": 256, "num_attention_heads": 16, "hidden_size": 2048, "linear_num_value_heads": 32,
    }  # fmt: skip
    shape = ModelConfig.from_dict(qwen, "")
    assert memory.kv_bytes_per_token(qwen, shape) == 12 * 2 * 2 * 256 * 2
    latent = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert memory.kv_bytes_per_token(latent, ModelConfig.from_dict(latent, "")) == 61 * 576 * 2


def test_mlx_keeps_our_limit_through_generation(model: Any, tmp_path: Path) -> None:
    from mlx_lm import stream_generate

    from swiftlet_mlx import load

    folder = make_checkpoint(tmp_path / "model", tokenizer=True)
    loaded, tokenizer = load(folder)
    for _ in stream_generate(loaded, tokenizer, "Hello", max_tokens=3):
        pass
    assert mx.set_cache_limit(memory.MLX_CACHE_BYTES) == memory.MLX_CACHE_BYTES
    assert loaded.pools.plan.pool == loaded.pools.nbytes
