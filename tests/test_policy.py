"""LFU gives up what a naive model of it would, and touches no resident it must keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlet_mlx.policy import LFU

HALVE_AFTER = 25


class Naive:
    """The same promise, by looking at everything every time."""

    def __init__(self) -> None:
        self.residents: set[int] = set()
        self.uses: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.now = 0
        self.halve_at = HALVE_AFTER

    def use(self, keys: list[int]) -> None:
        for key in keys:
            self.now += 1
            self.uses[key] = self.uses.get(key, 0) + 1
            self.last[key] = self.now
        if self.now >= self.halve_at:
            self.halve_at = self.now + HALVE_AFTER
            self.uses = {key: n // 2 for key, n in self.uses.items()}

    def evict(self, protected: set[int]) -> int:
        free = self.residents - protected
        if not free:
            raise LookupError
        victim = min(free, key=lambda k: (self.uses.get(k, 0), self.last.get(k, 0), k))
        self.residents.remove(victim)
        return victim


KEYS = st.integers(0, 11)
STEPS = st.one_of(
    st.tuples(st.just("use"), st.lists(KEYS, max_size=5)),
    st.tuples(st.just("add"), KEYS),
    st.tuples(st.just("evict"), st.sets(KEYS, max_size=6)),
)


@given(st.lists(STEPS, max_size=120))
def test_evictions_are_those_of_a_full_scan(steps: list[tuple[str, list[int]]]) -> None:
    fast, naive = LFU(HALVE_AFTER), Naive()
    for step, argument in steps:
        if step == "use":
            fast.use(argument)
            naive.use(argument)
        elif step == "add":
            fast.add(argument)  # type: ignore[arg-type]
            naive.residents.add(argument)  # type: ignore[arg-type]
        else:
            try:
                expected = naive.evict(set(argument))
            except LookupError:
                with pytest.raises(LookupError):
                    fast.evict(set(argument))
            else:
                assert fast.evict(set(argument)) == expected
        assert fast.residents == naive.residents
        assert len(fast._heap) == len(fast.residents)


def test_a_key_that_comes_back_resumes_its_count() -> None:
    policy = LFU()
    policy.use(["a", "a", "a", "b", "c"])  # type: ignore[list-item]
    for key in "abc":
        policy.add(key)  # type: ignore[arg-type]
    assert [policy.evict(), policy.evict(), policy.evict()] == ["b", "c", "a"]
    policy.add("a")  # type: ignore[arg-type]
    policy.add("c")  # type: ignore[arg-type]
    assert policy.evict() == "c"
    assert policy.uses == {"a": 3, "b": 1, "c": 1}


def test_an_eviction_does_not_look_at_every_resident() -> None:
    looked = 0

    class Counting(LFU):
        def _entry(self, key: int) -> tuple[int, int, int]:
            nonlocal looked
            looked += 1
            return super()._entry(key)

    policy = Counting()
    for key in range(1000):
        policy.use([key])
        policy.add(key)
    looked = 0
    for key in range(1000, 2000):
        policy.use([key])
        policy.add(key)
        policy.evict(protected=range(key, key + 1))
    assert looked < 4000


def test_what_an_old_topic_needed_does_not_stay_for_ever() -> None:
    policy = LFU(halve_after=100)
    policy.use([1] * 90)
    policy.add(1)
    policy.add(2)
    for _ in range(60):
        policy.use([2] * 10)
    assert policy.uses[1] < policy.uses[2]
    assert policy.evict() == 1
