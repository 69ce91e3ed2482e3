"""Caches that went back, forked or came from a file give the logits of a fresh pass, and the budget holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from talkers import Scripted, fresh_logits, random_model

from swiftlet_mlx.timeline import PrefixStore, Timeline

IDS = [(i * 53) % 350 for i in range(90)]
KINDS = ["qwen3_next", "qwen3_5_moe", "qwen3_moe"]


def fed(model: Any, ids: list[int], marks: tuple[int, ...] = ()) -> Timeline:
    timeline = Timeline(make_prompt_cache(model))
    for stop in sorted({*marks, len(ids)}):
        feed(model, timeline, ids[len(timeline) : stop])
        if stop in marks:
            timeline.checkpoint()
    return timeline


def feed(model: Any, timeline: Timeline, ids: list[int]) -> list[float]:
    logits = model(mx.array([ids]), cache=timeline.caches)[0, -1].astype(mx.float32)
    mx.eval([c.state for c in timeline.caches], logits)
    timeline.fed(ids)
    values: list[float] = logits.tolist()
    return values


def near(one: list[float], two: list[float]) -> bool:
    # Sums over chunks of other lengths are rounded in another order: float32 and a few layers.
    return max(abs(a - b) for a, b in zip(one, two, strict=True)) < 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_to_a_checkpoint_gives_the_logits_of_a_fresh_pass(kind: str) -> None:
    model = random_model(kind)
    timeline = fed(model, IDS, marks=(30, 60))
    for offset in (60, 30):
        assert timeline.reachable(offset) == offset
        timeline.rewind(offset)
        assert timeline.ids == IDS[:offset]
        other = [5, 6, 7, 8]
        assert near(feed(model, timeline, other), fresh_logits(model, IDS[:offset] + other))
    assert [c.offset for c in timeline.checkpoints] == [30]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_and_its_origin_do_not_disturb_each_other(kind: str) -> None:
    model = random_model(kind)
    origin = fed(model, IDS, marks=(40,))
    fork = origin.fork(40)
    assert near(feed(model, fork, [9, 8, 7]), fresh_logits(model, [*IDS[:40], 9, 8, 7]))
    assert near(feed(model, origin, [1, 2]), fresh_logits(model, [*IDS, 1, 2]))
    assert near(feed(model, fork, [4]), fresh_logits(model, [*IDS[:40], 9, 8, 7, 4]))


def test_the_very_end_can_be_forked_without_a_checkpoint_there() -> None:
    model = random_model("qwen3_next")
    timeline = fed(model, [5, 6, 7, 8])
    other = timeline.fork(4)
    assert near(feed(model, other, [9]), fresh_logits(model, [5, 6, 7, 8, 9]))
    assert len(timeline) == 4


def test_three_tokens_cannot_be_taken_off_a_recurrent_state() -> None:
    """Going back means a checkpoint or the beginning, never a state that has seen what it should not."""
    hybrid, plain = fed(random_model("qwen3_next"), IDS), fed(random_model("qwen3_moe"), IDS)
    assert hybrid.reachable(len(IDS) - 3) == 0
    assert plain.reachable(len(IDS) - 3) == len(IDS) - 3
    with pytest.raises(ValueError, match="not a checkpoint"):
        hybrid.rewind(len(IDS) - 3)
    with pytest.raises(ValueError, match="not a checkpoint"):
        hybrid.fork(len(IDS) - 3)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_advanced_unevenly_are_put_back(kind: str) -> None:
    model = random_model(kind)
    timeline = fed(model, IDS, marks=(len(IDS),))
    for cache in timeline.caches[:2]:
        if isinstance(cache, KVCache):
            cache.update_and_fetch(mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 8)))
        else:
            cache[1] = cache[1] * 3
    timeline.rewind(len(IDS), uneven=True)
    assert near(feed(model, timeline, [3]), fresh_logits(model, [*IDS, 3]))


def test_a_rotating_window_is_copied_since_it_overwrites_itself() -> None:
    cache = RotatingKVCache(max_size=4, keep=0)
    timeline = Timeline([cache])

    def feed_window(value: float) -> None:
        cache = timeline.caches[0]
        cache.update_and_fetch(mx.full((1, 1, 1, 2), value), mx.full((1, 1, 1, 2), value))
        mx.eval(cache.state[:2])
        timeline.fed([int(value)])

    for value in range(6):
        feed_window(float(value))
    timeline.checkpoint()
    before = timeline.caches[0].keys.tolist()
    for value in range(6, 9):
        feed_window(float(value))
    assert timeline.caches[0].keys.tolist() != before
    timeline.rewind(6)
    assert timeline.caches[0].keys.tolist() == before
    assert timeline.caches[0].offset == 6


def test_a_checkpoint_does_not_keep_the_buffer_its_state_was_cut_from() -> None:
    big = mx.arange(1_000_000, dtype=mx.float32).reshape(1000, 1000)
    mx.eval(big)
    cache = ArraysCache(size=1)
    cache[0] = big[-2:]
    timeline = Timeline([cache])
    timeline.fed([1])
    timeline.checkpoint()
    cache[0] = None
    mx.clear_cache()
    before = mx.get_active_memory()
    del big
    assert mx.get_active_memory() < before - 3_900_000
    assert timeline.checkpoints[0].states[0][0][0].tolist()[0][0] == 998_000.0


# ---- the store ----------------------------------------------------------------------------------------------------


def store_with(model: Any, *timelines: Timeline, budget: int = 10**9) -> PrefixStore:
    store = PrefixStore(budget)
    for timeline in timelines:
        store.put(timeline)
    return store


def test_the_longest_honest_prefix_is_taken_and_one_token_is_always_left() -> None:
    model = random_model()
    store = store_with(model, fed(model, IDS[:50], (20,)), fed(model, IDS, (60,)))
    taken = store.take(IDS)
    assert taken is not None
    assert taken.ids == IDS[:60]
    taken = store_with(model, fed(model, IDS)).take([*IDS, 7])
    assert taken is not None
    assert taken.ids == IDS


def test_another_conversation_finds_nothing() -> None:
    model = random_model()
    store = store_with(model, fed(model, IDS, (30, 60)))
    assert store.take([1, *IDS]) is None
    assert store.take(IDS[:10]) is None, "a checkpoint beyond what is shared does not count"
    assert len(store) == 1


def test_earlier_turns_survive_a_conversation_that_parts_from_them() -> None:
    model = random_model()
    first = fed(model, IDS, (30, 60))
    first.turn = 60
    store = store_with(model, first)
    other = store.take([*IDS[:30], 1, 2, 3])
    assert other is not None
    assert other is not first
    assert len(store) == 1
    again = store.take([*IDS[:60], 9])
    assert again is first, "only the reply to the last turn is lost"
    assert len(store) == 0


def test_a_timeline_that_another_covers_is_not_kept_twice() -> None:
    model = random_model()
    store = store_with(model, fed(model, IDS[:60], (30,)), fed(model, IDS, (30, 60)))
    assert len(store) == 1
    store = store_with(model, fed(model, IDS[:60], (30,)), fed(model, IDS, (60,)))
    assert len(store) == 2, "the shorter one can be taken up at 30, the longer one cannot"


def test_the_budget_holds_and_the_oldest_go_first() -> None:
    model = random_model()
    one = fed(model, IDS, (30,))
    size = store_with(model, one).nbytes
    store = store_with(model, one, budget=int(size * 2.5))
    for start in range(1, 6):
        store.put(fed(model, [start, *IDS], (30,)))
        assert store.nbytes <= store.budget_bytes
    assert len(store) == 2
    assert store.take([*IDS, 1]) is None
    assert store.take([5, *IDS, 1]) is not None


def test_a_single_timeline_gives_up_the_checkpoints_between_first_and_last() -> None:
    model = random_model()
    timeline = fed(model, IDS, (10, 20, 30, 40, 50))
    full = store_with(model, timeline).nbytes
    store_with(model, timeline, budget=full - 1)
    assert [c.offset for c in timeline.checkpoints] == [10, 30, 40, 50]
    bare = store_with(model, fed(model, IDS)).nbytes
    store = store_with(model, timeline, budget=bare)
    assert timeline.checkpoints == []
    assert len(store) == 1
    assert len(store_with(model, timeline, budget=bare - 1)) == 0


def test_shared_arrays_count_once() -> None:
    model = random_model()
    origin = fed(model, IDS, (40,))
    alone = store_with(model, origin).nbytes
    fork = origin.fork(40)
    fork.fed([])
    marks = sum(a.nbytes for c in origin.checkpoints for a in c.arrays())
    apart = store_with(model, fed(model, IDS[:40], (40,))).nbytes
    assert store_with(model, origin, fork).nbytes <= alone + apart - marks


def test_two_hundred_turns_stay_within_the_budget_and_hold_what_was_said() -> None:
    """Caches that hold the tokens themselves and their sum, so that each turn can be looked into."""
    model = Scripted([[1]], eos=2)
    store = PrefixStore(7_000)
    ids: list[int] = []
    for turn in range(200):
        ids = [*ids[-60:], turn % 350, 3] if len(ids) > 120 else [*ids, turn % 350, 3]
        timeline = store.take(ids) or Timeline(make_prompt_cache(model))
        assert timeline.ids == ids[: len(timeline)]
        assert len(timeline) < len(ids)
        rest = ids[len(timeline) :]
        model(mx.array([rest]), cache=timeline.caches)
        timeline.fed(rest)
        timeline.checkpoint()
        keys, sums = timeline.caches
        assert keys.state[0][0, 0, : len(ids), 0].tolist() == ids
        assert sums[0].item() == sum(ids)
        store.put(timeline)
        assert store.nbytes <= 7_000
    assert len(store) > 1, "more than the last one fits"
