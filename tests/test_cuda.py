"""Advice to CUDA's driver: given for slots on that backend only, and never more than advice."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from swiftlet_mlx import cuda, slots
from swiftlet_mlx.qpack import make_table
from swiftlet_mlx.slots import SlotPool

TABLE = make_table(0, 4, {"fc1.weight": ("U8", (8, 4)), "fc2.weight": ("F32", (5,))})


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    given: list[Any] = []
    monkeypatch.setattr(cuda, "_advise", lambda: lambda *a: given.append(a))
    return given


def test_other_backends_get_no_advice(advice: list[Any]) -> None:
    SlotPool(TABLE, 2)
    assert advice == []


def test_slots_are_to_stay_on_the_host_and_be_read_from_there(
    advice: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "backend", lambda: "cuda")
    pool = SlotPool(TABLE, 2)
    places = {np.frombuffer(view, np.uint8).ctypes.data: view.nbytes for view, _ in pool._views}
    assert {a: n for a, n, *_ in advice} == places
    assert {(what, at.type) for *_, what, at in advice} == {(3, 2), (5, 1)}


def test_a_driver_without_the_function_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "backend", lambda: "cuda")

    def missing(name: str) -> Any:
        raise OSError(name)

    cuda._advise.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert SlotPool(TABLE, 2).direct
    cuda._advise.cache_clear()


def test_whole_layers_are_let_go_to_the_device_and_come_back_to_be_written(
    advice: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "backend", lambda: "cuda")
    pool = SlotPool(TABLE, 4)
    for expert, slot in pool.claim(range(4)):
        for row in pool.rows(slot):
            row[:] = bytes([expert]) * len(row)
        pool.settle(expert, slot, ok=True)
    before = pool.arrays["fc1.weight"]
    pool.settle_on_device()
    assert pool.arrays["fc1.weight"] is not before
    assert pool._views == [], "a view would fetch the memory back"
    assert np.array(pool.arrays["fc1.weight"])[3].max() == 3
    pool.resize(2)
    assert len(pool._views) == 2
    assert all(bytes(row) == bytes([e]) * len(row) for e in pool.policy.residents for row in pool.rows(pool.slots[e]))
