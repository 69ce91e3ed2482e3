"""A small streamed model, stepped token by token, and what must hold of its slots afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray
from tiny import make_checkpoint

from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.slots import EMPTY

LAYERS = 4
Logits = list[NDArray[Any]]


def checkpoints(roots: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind of model to its checkpoint, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            shape = {"layers": LAYERS, "hidden": 64}
            made[kind] = make_checkpoint(roots.mktemp("steps") / "model", kind=kind, bits=4, shape=shape)
        return made[kind]

    return folder


def load(folder: Path, slots: int) -> Any:
    """A model with so many slots a layer, as an engine owns it."""
    model: Any = load_streamed(folder, cache_gb=1.0, threads=3)[0]
    pools = model.pools
    pools.resize(sum(slots * pool.table.payload_bytes for pool in pools.layers.values()))
    assert {pool.n_slots for pool in pools.layers.values()} == {slots}
    pools.alone = True
    return model


def decode(model: Any, tokens: Sequence[int]) -> Logits:
    """The logits after each token, fed one by one."""
    cache = make_prompt_cache(model)
    return [np.array(model(mx.array([[token]]), cache=cache)[0, -1]) for token in tokens]


def same(a: Logits, b: Logits) -> bool:
    """To the last bit."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def check_table(model: Any) -> None:
    """Every slot is free or holds, byte for byte, the expert the table names."""
    assert model.pools._open is model.pools._ahead is None
    for layer, pool in model.pools.layers.items():
        residents = {e for e, slot in enumerate(pool.slots) if slot != EMPTY}
        assert residents == pool.policy.residents
        assert len(residents) + pool.n_free == pool.n_slots, "a slot was lost"
        assert len({pool.slots[e] for e in residents}) == len(residents), "two experts in one slot"
        for e in residents:
            wanted = [bytearray(s.size) for s in pool.table.sections]
            model.pools.source.read(layer, e, [[memoryview(b) for b in wanted]])
            at = pool.slots[e]
            held = [
                memoryview(cast(Any, pool.arrays[s.name])).cast("B")[at * s.size : (at + 1) * s.size]
                for s in pool.table.sections
            ]
            assert [bytes(row) for row in held] == [bytes(b) for b in wanted]
