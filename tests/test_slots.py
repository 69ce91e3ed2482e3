"""One layer's slots: never two experts in one, never stale bytes, never more than were asked for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlet_mlx.layout import LayerTable, make_table
from swiftlet_mlx.slots import DTYPES, EMPTY, SlotPool

PARTS = {"fc1.weight": ("U32", (2, 3)), "fc1.scales": ("BF16", (2,)), "fc2.weight": ("F16", (5,))}
E = 7


def table(experts: int = E) -> LayerTable:
    return make_table(1, experts, PARTS)


def content(expert: int, section: str) -> bytes:
    n = next(s.size for s in table().sections if s.name == section)
    return bytes((expert * 37 + len(section) * 5 + i) % 251 for i in range(n))


def put(pool: SlotPool, expert: int, slot: int) -> None:
    for section, row in zip(pool.table.sections, pool.rows(slot), strict=True):
        row[:] = content(expert, section.name)


def stored(pool: SlotPool, slot: int) -> dict[str, bytes]:
    """What the device sees in a slot."""
    return {name: bytes(np.array(a[slot].reshape(-1).view(mx.uint8))) for name, a in pool.arrays.items()}


def check(pool: SlotPool) -> None:
    held = {e: s for e, s in enumerate(pool.slots) if s != EMPTY}
    assert set(held) == pool.policy.residents
    assert len(set(held.values())) == len(held), "two experts in one slot"
    assert not set(held.values()) & set(pool._free)
    assert all(0 <= s < pool.n_slots for s in (*held.values(), *pool._free))
    assert sum(a.nbytes for a in pool.arrays.values()) == pool.nbytes == pool.n_slots * pool.table.payload_bytes
    assert pool.complete == (len(held) == pool.table.expert_count)
    for e, slot in held.items():
        assert stored(pool, slot) == {name: content(e, name) for name in pool.arrays}, e
        if pool.n_slots == pool.table.expert_count:
            assert e == slot


STEPS = st.one_of(
    st.tuples(st.just("want"), st.lists(st.integers(0, E - 1), min_size=1, max_size=E, unique=True)),
    st.tuples(st.just("fail"), st.lists(st.integers(0, E - 1), min_size=1, max_size=E, unique=True)),
    st.tuples(st.just("resize"), st.integers(1, E)),
)


@given(st.integers(1, E), st.lists(STEPS, max_size=14))
def test_table_and_bytes_agree_whatever_happens(n_slots: int, steps: list[tuple[str, Any]]) -> None:
    pool = SlotPool(table(), n_slots)
    for step, argument in steps:
        if step == "resize":
            before = set(pool.policy.residents)
            pool.resize(argument)
            assert pool.n_slots == argument
            assert pool.policy.residents <= before
            assert len(pool.policy.residents) == min(argument, len(before))
        else:
            wanted = argument[: pool.n_slots]
            claims = pool.claim(wanted)
            assert {e for e, _ in claims} == {e for e in wanted if pool.slots[e] == EMPTY}
            for n, (e, slot) in enumerate(claims):
                ok = step == "want" or n % 2 == 0
                put(pool, e if ok else 99, slot)  # a failed read leaves anything
                pool.settle(e, slot, ok)
            pool.policy.use(wanted)
            if step == "want":
                assert set(wanted) <= pool.policy.residents
                assert pool.lookup(np.array(wanted, np.uint32)).tolist() == [pool.slots[e] for e in wanted]
                assert pool.lookup_few(wanted, (1, len(wanted))).tolist() == [[pool.slots[e] for e in wanted]]
        check(pool)


def test_an_expert_without_a_slot_is_an_error_not_garbage() -> None:
    pool = SlotPool(table(), 2)
    with pytest.raises(LookupError, match="layer 1"):
        pool.lookup(np.array([[0, 1]], np.uint32))
    with pytest.raises(LookupError, match="layer 1"):
        pool.lookup_few([0, 1], (1, 2))


def test_more_experts_than_slots_are_refused_before_one_is_lost() -> None:
    pool = SlotPool(table(), 2)
    with pytest.raises(LookupError, match="protected"):
        pool.claim([0, 1, 2])


def test_protected_residents_stay() -> None:
    pool = SlotPool(table(), 3)
    for e, slot in pool.claim([0, 1, 2]):
        put(pool, e, slot)
        pool.settle(e, slot, ok=True)
    pool.claim([3], protected=[0, 1])
    assert pool.slots[0] != EMPTY
    assert pool.slots[1] != EMPTY
    assert pool.slots[2] == EMPTY


def test_the_experts_in_use_most_survive_a_smaller_pool() -> None:
    pool = SlotPool(table(), 5)
    for e, slot in pool.claim(range(5)):
        put(pool, e, slot)
        pool.settle(e, slot, ok=True)
    pool.policy.use([3, 3, 1, 0])
    pool.resize(2)
    assert pool.policy.residents == {3, 0}
    check(pool)


def test_users_of_the_arrays_are_told_of_new_ones() -> None:
    pool, seen = SlotPool(table(), 5), []
    pool.on_arrays(lambda p: seen.append(p.arrays["fc1.weight"].shape[0]))
    pool.resize(2)
    assert seen[0] == 5
    assert seen[-1] == 2


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_stored_type_arrives_as_its_bytes(dtype: str) -> None:
    pool = SlotPool(make_table(0, 2, {"fc1.weight": (dtype, (2, 4))}), 2)
    value = np.arange(DTYPES[dtype].size * 8, dtype=np.uint8)
    pool.rows(1)[0][:] = value.tobytes()
    assert pool.arrays["fc1.weight"].dtype == DTYPES[dtype]
    assert np.array_equal(np.array(pool.arrays["fc1.weight"][1].reshape(-1).view(mx.uint8)), value)


def test_a_staged_fill_stores_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "_sees_host_writes", lambda self: False)
    pool = SlotPool(table(), 3)
    assert not pool.direct
    for e, slot in pool.claim([4, 2]):
        pool.store_staged(slot, [bytearray(content(e, s.name)) for s in pool.table.sections])
        pool.settle(e, slot, ok=True)
    check(pool)
    pool.resize(5)
    check(pool)


def test_the_self_check_notices_a_device_that_does_not_see_host_writes() -> None:
    pool = SlotPool(table(), 1)
    assert pool._sees_host_writes()
    size = pool._views[0][1]
    pool._views[0] = (memoryview(bytearray(size)), size)  # writes that go elsewhere
    assert not pool._sees_host_writes()
