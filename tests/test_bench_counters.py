"""Counters that depend on no machine: what decoding and reading a prompt must read, evict, read back and allocate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from bench_models import tiny
from swiftlet_bench import decode, predict
from swiftlet_bench.subject import Subject, opened

from swiftlet_mlx import memory, pools
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.locate import find_model
from swiftlet_mlx.policy import LFU


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def demo() -> Path:
    return find_model("demo")


class Replay:
    """What a layer's cache must do with the recorded choices: the expectation is computed, not written down."""

    def __init__(self, n_slots: int) -> None:
        self.policy, self.n_slots = LFU(), n_slots
        self.misses = self.evictions = 0

    def step(self, experts: list[int]) -> None:
        self.policy.use(experts)
        missing = [e for e in experts if e not in self.policy.residents]
        self.misses += len(missing)
        free = self.n_slots - len(self.policy.residents)
        for _ in range(len(missing) - free):
            self.policy.evict(set(experts))
            self.evictions += 1
        for expert in missing:
            self.policy.add(expert)


def decode_and_replay(subject: Subject, n_tokens: int) -> tuple[dict[str, float], Counter[str]]:
    """Decode from an empty pool, beside a replay of the same choices. The prompt is one token: no prefill."""
    pools = subject.pools
    replays = {layer: Replay(pool.n_slots) for layer, pool in pools.layers.items()}
    pools.recorder = lambda layer, experts: replays[layer].step(list(experts))
    before = pools.stats.copy()
    subject.run(subject.prompt(1), n_tokens)
    done = pools.stats.since(before)
    found = {name: getattr(done, name) for name in ("misses", "evictions", "reads", "read_bytes", "read_backs")}
    expected: Counter[str] = Counter()
    for layer, replay in replays.items():
        expected["misses"] += replay.misses
        expected["reads"] += replay.misses
        expected["evictions"] += replay.evictions
        expected["read_bytes"] += replay.misses * pools.layers[layer].table.payload_bytes
        expected["read_backs"] += n_tokens
    return found, expected


@pytest.mark.parametrize("model", ["container", "demo"])
@pytest.mark.parametrize("slots_a_layer", [4, 7])
def test_decoding_reads_back_evicts_and_reads_exactly_what_the_routes_demand(
    model: str, slots_a_layer: int, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    shape = predict.shape_here(folder)
    budget = shape.layers * slots_a_layer * shape.expert_bytes / memory.GB
    with opened(folder, cache_gb=budget) as subject:
        assert {p.n_slots for p in subject.pools.layers.values()} == {slots_a_layer}
        found, expected = decode_and_replay(subject, 24)
    assert found == expected
    assert found["evictions"] > 0


def test_a_resident_model_reads_nothing_and_never_asks_for_the_routers_choice(demo: Path) -> None:
    with opened(demo, cache_gb=1) as subject:
        values = subject.run(subject.prompt(16), 8)
        assert subject.sizes()["cache_slots"] == subject.sizes()["all_experts"] == 384
    for name in ("read_backs_per_token", "reads_per_token", "read_bytes_per_token", "evictions_per_token"):
        assert values[name] == 0, name
    assert values["prefill_read_bytes"] == 0
    assert values["hit_rate"] == 1


@pytest.fixture(scope="module")
def routed(demo: Path) -> Iterator[Callable[[Sequence[int]], int]]:
    """How many (layer, expert) pairs stock mlx-lm routes a prompt to, the last layer left out: what its experts say of
    a prompt's inner tokens is in no cache, so nobody needs it."""
    seen: set[tuple[int, int]] = set()
    model, _ = load_streamed(demo, cache_gb=1)
    with decode.stock(demo, model) as stock:
        for n, layer in enumerate(stock.layers[:-1]):
            layer.mlp["switch_mlp"] = noting(n, layer.mlp.switch_mlp, seen)

        def of(prompt: Sequence[int]) -> int:
            seen.clear()
            mx.eval(stock(mx.array([prompt])))
            return len(seen)

        yield of
    model.pools.close()


def noting(layer: int, inner: Any, seen: set[tuple[int, int]]) -> Any:
    def note(x: mx.array, indices: mx.array) -> Any:
        seen.update((layer, int(e)) for e in np.array(indices).reshape(-1))
        return inner(x, indices)

    return note


@pytest.mark.parametrize("length", [9, 60])
def test_a_prompt_reads_each_expert_it_is_routed_to_exactly_once(
    demo: Path, length: int, routed: Callable[[Sequence[int]], int]
) -> None:
    """All tokens but the last in one pass, each expert once; the last is decoded, and reads what is not there yet."""
    shape = predict.shape_here(demo)
    with opened(demo, cache_gb=8 * 8 * shape.expert_bytes / memory.GB) as subject:
        prompt = subject.prompt(length)
        missing: list[int] = []
        pools = subject.pools.layers
        subject.pools.recorder = lambda layer, experts: missing.extend(
            e for e in experts if e not in pools[layer].policy.residents
        )
        values = subject.run(prompt, 1)
    experts = routed(prompt[:-1]) + len(missing)
    assert values["prefill_read_bytes"] == experts * shape.expert_bytes
    assert values["prefill_reads"] <= experts  # neighbours are read together


@pytest.mark.parametrize("slots_a_layer", [4, 7])
def test_a_decoded_token_leaves_nothing_allocated_and_keeps_the_arrays_of_the_pool(
    demo: Path, slots_a_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one step of the attention caches, which grow by 256 tokens at a time."""
    monkeypatch.setattr(pools, "LONG_SECONDS", float("inf"))  # or a busy machine changes what is held between steps
    shape = predict.shape_here(demo)
    with opened(demo, cache_gb=8 * slots_a_layer * shape.expert_bytes / memory.GB) as subject:
        before = addresses(subject)
        values = subject.run(subject.prompt(5), 24)
        assert addresses(subject) == before
    assert values["evictions_per_token"] > 0
    assert values["allocated_bytes_per_token"] == 0


def test_a_leak_of_one_array_a_token_is_seen(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[mx.array] = []
    right = Subject._counters

    def leaking(self: Subject) -> Any:
        leaked.append(mx.zeros((16_384,), mx.float32))
        mx.eval(leaked)
        return right(self)

    monkeypatch.setattr(Subject, "_counters", leaking)
    with opened(demo, cache_gb=0.001) as subject:
        assert subject.run(subject.prompt(5), 9)["allocated_bytes_per_token"] == pytest.approx(65_536, rel=0.1)


def addresses(subject: Subject) -> list[int]:
    """Where the memory of each array of the pool lies."""
    arrays = [a for pool in subject.pools.layers.values() for a in pool.arrays.values()]
    return [np.frombuffer(memoryview(a).cast("B"), np.uint8).ctypes.data for a in arrays]  # type: ignore[arg-type]
