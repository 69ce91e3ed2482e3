"""One thread, requests in order, errors and cancellations that end what they belong to and nothing else."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from talkers import N_VOCAB, Scripted, random_model, tokenizer

from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import (
    ContextFull,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    GenerationFailed,
    OptionError,
    ReadFailed,
    SamplingError,
)
from swiftlet_mlx.events import Event, Finish, FinishReason, Progress, Started, Statistics, TextDelta
from swiftlet_mlx.generation import Request, Token
from swiftlet_mlx.sampling import Sampling

PROMPT = tuple((i * 37) % 350 for i in range(60))


class Ids:
    """A consumer that gives ids out as text, separated by spaces."""

    thinking_tokens = 0

    def __init__(self) -> None:
        self.tokens: list[Token] = []

    def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
        self.tokens.append(token)
        return [TextDelta(f"{token.id} ")], None

    def finish(self, reason: FinishReason) -> tuple[Sequence[Event], Finish]:
        return (), Finish(reason)


def request(ids: tuple[int, ...] = PROMPT, **options: Any) -> Request:
    return Request(**{"ids": ids, "consumer": Ids(), "max_tokens": 8, **options})


def unchanged(_generated: list[int], logits: mx.array) -> mx.array:
    """A processor; where there is one, no step is launched before the last one's token is known."""
    return logits


def ids_of(events: list[Event]) -> list[int]:
    return [int(word) for e in events if isinstance(e, TextDelta) for word in e.text.split()]


def stats(events: list[Event]) -> Statistics:
    return next(e for e in events if isinstance(e, Statistics))


def reason(events: list[Event]) -> str:
    assert isinstance(events[-1], Finish)
    return events[-1].reason


def stock(model: Any, ids: Sequence[int], n: int) -> list[int]:
    """What mlx-lm itself generates."""
    return [t for t, _ in generate_step(mx.array(list(ids)), model, max_tokens=n)]


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(model: Any, **options: Any) -> Engine:
        engines.append(Engine(lambda: (model, tokenizer()), **options))
        engines[-1].wait()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


# ---- the right tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe", "qwen3_moe"])
@pytest.mark.parametrize("step", [7, 2048])
@pytest.mark.parametrize("ahead", [True, False])
def test_greedy_tokens_are_those_of_mlx_lm(start: Callable[..., Engine], kind: str, step: int, ahead: bool) -> None:
    model = random_model(kind)
    expected = stock(model, PROMPT, 24)
    processors = () if ahead else (unchanged,)
    events = list(start(model, prefill_step_size=step).submit(request(max_tokens=24, processors=processors)))
    assert ids_of(events) == expected
    assert reason(events) == "length"


def test_log_probabilities_are_those_of_mlx_lm(start: Callable[..., Engine]) -> None:
    model = random_model()
    expected = list(generate_step(mx.array(list(PROMPT)), model, max_tokens=6))
    consumer = Ids()
    list(start(model).submit(request(consumer=consumer, max_tokens=6, logprobs=3)))
    for token, (id_, logprobs) in zip(consumer.tokens, expected, strict=True):
        assert token.id == id_
        assert token.logprob == pytest.approx(logprobs[id_].item(), abs=1e-5)
        assert token.top[0] == (id_, token.logprob)
        assert len(token.top) == 3


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe"])
def test_a_prompt_that_was_answered_before_is_answered_the_same(start: Callable[..., Engine], kind: str) -> None:
    """Wholly cached prompts, and prompts that end where an earlier reply ended: at least one token is read again."""
    model = random_model(kind)
    engine = start(model)
    first = ids_of(list(engine.submit(request(max_tokens=3))))
    again = list(engine.submit(request(max_tokens=3)))
    assert ids_of(again) == first
    assert stats(again).cached_tokens == len(PROMPT) - 1
    longer = (*PROMPT, *first)
    more = list(engine.submit(request(longer, max_tokens=5)))
    assert ids_of(more) == stock(model, longer, 5)
    assert len(PROMPT) <= stats(more).cached_tokens < len(longer)


def test_a_logits_processor_may_constrain_the_reply(start: Callable[..., Engine]) -> None:
    def only_five(generated: list[int], logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.size) == 5 + len(generated), logits, -1e9)

    events = list(start(random_model()).submit(request(max_tokens=3, processors=(only_five,))))
    assert ids_of(events) == [5, 6, 7]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_gives_the_same_tokens_cached_or_not(start: Callable[..., Engine], seed: int) -> None:
    engine = start(random_model())
    sampling = Sampling(temperature=1.0, seed=seed, top_p=0.95)
    one, two = (ids_of(list(engine.submit(request(sampling=sampling)))) for _ in range(2))
    assert one == two


# ---- stopping -----------------------------------------------------------------------------------------------------


def test_every_end_token_ends_the_reply_and_is_not_part_of_it(start: Callable[..., Engine]) -> None:
    for end in (358, 9):
        events = list(start(Scripted([[1, 2, 3]], eos=end)).submit(request(eos_ids=frozenset({9, 358}))))
        assert ids_of(events) == [1, 2, 3]
        assert reason(events) == "stop"


def test_a_reply_stops_at_its_budget_and_when_the_consumer_says(start: Callable[..., Engine]) -> None:
    engine = start(Scripted([[1, 2, 3, 4, 5]], eos=358))
    assert ids_of(list(engine.submit(request(max_tokens=2)))) == [1, 2]

    class Two(Ids):
        def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
            return super().token(token)[0], "stop" if token.id == 3 else None

    events = list(engine.submit(request(consumer=Two())))
    assert ids_of(events) == [1, 2, 3]
    assert reason(events) == "stop"


def test_events_come_in_their_order_and_count_truly(start: Callable[..., Engine]) -> None:
    counters = {"hits": 0}

    def on_step(_step: int) -> None:
        counters["hits"] += 2

    engine = start(
        Scripted([[1, 2, 3]], eos=358, on_step=on_step), prefill_step_size=25, counters=lambda _m: dict(counters)
    )
    events = list(engine.submit(request(eos_ids=frozenset({358}), processors=(unchanged,))))
    names = [type(e).__name__ for e in events]
    assert names == [
        "Started",
        "Progress",
        "Progress",
        "Progress",
        "TextDelta",
        "TextDelta",
        "TextDelta",
        "Statistics",
        "Finish",
    ]
    assert [e.done for e in events if isinstance(e, Progress)] == [25, 50, 59]
    found = stats(events)
    assert (found.prompt_tokens, found.cached_tokens, found.generated_tokens) == (60, 0, 3)
    assert found.counters == {"hits": 8}
    assert found.ttft_seconds == pytest.approx(found.queue_seconds + found.prefill_seconds)


@pytest.mark.parametrize("ahead", [True, False])
def test_what_was_fed_ahead_is_known_to_the_cache(start: Callable[..., Engine], ahead: bool) -> None:
    """However a reply ends, going on from its cache gives what a fresh pass gives."""
    model = random_model()
    engine = start(model)
    processors = () if ahead else (unchanged,)
    said = stock(model, PROMPT, 6)
    first = list(engine.submit(request(max_tokens=20, eos_ids=frozenset({said[3]}), processors=processors)))
    n_said = said.index(said[3])
    assert ids_of(first) == said[:n_said]
    longer = (*PROMPT, *said[: n_said + 1], 5)
    more = list(engine.submit(request(longer, max_tokens=6)))
    assert ids_of(more) == stock(model, longer, 6)
    assert stats(more).cached_tokens == len(PROMPT) + n_said + ahead


# ---- cancelling ---------------------------------------------------------------------------------------------------


def test_a_cancelled_reply_finishes_and_the_next_one_is_right(start: Callable[..., Engine]) -> None:
    model = random_model()
    engine = start(model)
    stream = engine.submit(request(max_tokens=100_000, consumer=Ids()))
    got = [e for e in (next(stream) for _ in range(6)) if isinstance(e, TextDelta)]
    stream.cancel()
    rest = list(stream)
    assert got
    assert reason(rest) == "cancelled"
    said = ids_of([*got, *rest])
    longer = (*PROMPT, *said)
    assert ids_of(list(engine.submit(request(longer)))) == stock(model, longer, 8)


def test_cancelling_takes_effect_between_pieces_of_the_prompt(start: Callable[..., Engine]) -> None:
    model = random_model()
    engine = start(model, prefill_step_size=8)
    stream = engine.submit(request())
    for event in stream:
        if isinstance(event, Progress):
            stream.cancel()
            break
    rest = list(stream)
    assert reason(rest) == "cancelled"
    assert stats(rest).generated_tokens == 0
    again = list(engine.submit(request()))
    assert stats(again).cached_tokens > 0, "what had been read by then is kept"
    assert ids_of(again) == stock(model, PROMPT, 8)


def test_a_waiting_request_can_be_cancelled_without_its_turn_coming(start: Callable[..., Engine]) -> None:
    gate = threading.Event()
    engine = start(Scripted([[1] * 50], eos=358, on_step=lambda _s: gate.wait(10) and None))
    first = engine.submit(request())
    next(first)
    second = engine.submit(request())
    second.cancel()
    assert reason(list(second)) == "cancelled"
    assert not first.done
    assert engine.waiting == 0
    gate.set()
    assert reason(list(first)) == "length"


def test_a_dropped_stream_frees_the_engine(start: Callable[..., Engine]) -> None:
    steps: list[int] = []
    engine = start(Scripted([[1] * 20_000], eos=358, context=10**6, on_step=steps.append))
    stream = engine.submit(request(max_tokens=20_000))
    next(stream)
    del stream
    gc.collect()
    assert reason(list(engine.submit(request(max_tokens=2)))) == "length"
    assert len(steps) < 10_000


def test_a_prefill_of_its_own_may_be_broken_off_and_leaves_even_caches(start: Callable[..., Engine]) -> None:
    model = random_model()
    calls: list[tuple[int, int]] = []
    stop_at: list[int] = [1]

    def by_halves(model: Any, tokens: mx.array, cache: list[Any], *, progress: Callable[[int, int], None]) -> None:
        n = tokens.size
        for i, span in enumerate((tokens[: n // 2], tokens[n // 2 :])):
            model(span[None], cache=cache)
            mx.eval([c.state for c in cache])
            calls.append((n, i))
            if i == stop_at[0]:
                stream.cancel()
            progress((i + 1) * n // 2, n)

    engine = start(model, prefill_step_size=16, prefill=by_halves)
    stream = engine.submit(request())
    assert reason(list(stream)) == "cancelled"
    stop_at[0] = -1
    events = list(engine.submit(request()))
    assert ids_of(events) == stock(model, PROMPT, 8)
    assert calls == [(59, 0), (59, 1), (59, 0), (59, 1)]


def test_a_prefill_of_its_own_tells_how_far_it_is_of_the_whole_prompt(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_thirds(model: Any, tokens: mx.array, cache: list[Any], *, progress: Callable[[int, int], None]) -> None:
        model(tokens[None], cache=cache)
        for third in (1, 2, 3):
            progress(third * tokens.size // 3, tokens.size)

    monkeypatch.setattr("swiftlet_mlx.generation.TELL_SECONDS", -1.0)
    engine = start(random_model("qwen3_moe"), prefill=in_thirds, idle_seconds=None)
    list(engine.submit(request(PROMPT[:30], max_tokens=0)))
    told = [e for e in engine.submit(request(max_tokens=1)) if isinstance(e, Progress)]
    left = len(PROMPT) - 1 - 30
    assert told == [Progress(30 + third * left // 3, len(PROMPT)) for third in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe"])
def test_a_later_turn_broken_off_between_two_layers_is_read_anew_from_where_it_began(
    start: Callable[..., Engine], kind: str
) -> None:
    """A pass that goes layer by layer leaves some layers ahead of the others."""
    model = random_model(kind)
    breaking = [False]

    def uneven(model: Any, tokens: mx.array, cache: list[Any], *, progress: Callable[[int, int], None]) -> None:
        kept = [type(c).from_state(c.state) for c in cache] if breaking[0] and not cache[0].empty() else []
        model(tokens[None], cache=cache)
        mx.eval([c.state for c in cache])
        if kept:
            cache[-1] = kept[-1]  # the last layer has not seen them yet
            stream.cancel()
        progress(tokens.size, tokens.size)

    engine = start(model, prefill=uneven, idle_seconds=None)
    first = list(engine.submit(request()))
    longer = (*PROMPT, *ids_of(first), *range(40, 60))
    breaking[0] = True
    stream = engine.submit(request(longer))
    assert reason(list(stream)) == "cancelled"
    breaking[0] = False
    again = list(engine.submit(request(longer)))
    assert stats(again).cached_tokens >= len(PROMPT) - 1
    assert ids_of(again) == stock(model, longer, 8)


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("the disk has gone"), SystemExit("a hook gave up"), ReadFailed("layer 3, expert 7: got 5")]
)
def test_an_error_ends_its_request_and_no_other(start: Callable[..., Engine], error: BaseException) -> None:
    failing = [True]

    def on_step(step: int) -> None:
        if failing[0] and step == 2:
            raise error

    engine = start(Scripted([[1, 2, 3, 4]], eos=358, on_step=on_step))
    stream, waiting = engine.submit(request()), engine.submit(request(max_tokens=2))
    with pytest.raises(ReadFailed if isinstance(error, ReadFailed) else GenerationFailed, match=str(error)):
        list(stream)
    assert list(stream) == [], "after the error there is only the end"
    assert ids_of(list(waiting)) == [1, 2]
    failing[0] = False
    events = list(engine.submit(request((*PROMPT, 5), eos_ids=frozenset({358}))))
    assert ids_of(events) == [1, 2, 3, 4]
    assert engine.state == "ready"


def breaking(layer: Any, at_once: bool) -> list[bool]:
    """Let a layer fail while the one entry of the list is true."""
    broken = [at_once]

    class Breaks(type(layer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if broken[0]:
                raise OSError("a read failed in layer 2")
            return super().__call__(*args, **kwargs)

    layer.__class__ = Breaks
    return broken


def test_the_cache_of_a_failed_request_is_thrown_away(start: Callable[..., Engine]) -> None:
    model = random_model()
    broken = breaking(model.layers[2], True)
    engine = start(model)
    with pytest.raises(GenerationFailed, match="layer 2"):
        list(engine.submit(request()))
    broken[0] = False
    events = list(engine.submit(request()))
    assert stats(events).cached_tokens == 0
    assert ids_of(events) == stock(model, PROMPT, 8)


def test_a_failed_later_turn_leaves_nothing_uneven_behind(start: Callable[..., Engine]) -> None:
    model = random_model()
    broken = breaking(model.layers[2], False)
    engine = start(model, idle_seconds=None)
    longer = (*PROMPT, *ids_of(list(engine.submit(request()))), *range(40, 60))
    broken[0] = True
    with pytest.raises(GenerationFailed, match="layer 2"):
        list(engine.submit(request(longer)))
    broken[0] = False
    assert ids_of(list(engine.submit(request(longer)))) == stock(model, longer, 8)


def test_a_consumer_that_fails_ends_its_request_only(start: Callable[..., Engine]) -> None:
    class Bad(Ids):
        def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
            raise ZeroDivisionError

    engine = start(random_model())
    with pytest.raises(GenerationFailed, match="ZeroDivisionError"):
        list(engine.submit(request(consumer=Bad())))
    assert reason(list(engine.submit(request()))) == "length"


def test_a_model_that_does_not_load_says_why_to_everyone() -> None:
    gate = threading.Event()

    def load() -> Any:
        gate.wait(10)
        raise FileNotFoundError("no such folder: moon.qpack")

    with Engine(load) as engine:
        early = engine.submit(request())
        assert engine.state == "loading"
        gate.set()
        with pytest.raises(EngineFailed, match=r"moon\.qpack"):
            engine.wait()
        with pytest.raises(EngineFailed, match=r"moon\.qpack"):
            list(early)
        with pytest.raises(EngineFailed, match=r"moon\.qpack"):
            engine.submit(request())
        assert engine.state == "failed"


# ---- what is refused before it runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        ({"ids": ()}, OptionError, "empty"),
        ({"ids": (1, N_VOCAB)}, OptionError, f"token id {N_VOCAB}"),
        ({"ids": (-1,)}, OptionError, "token id -1"),
        ({"max_tokens": -1}, OptionError, "max_tokens is -1"),
        ({"sampling": Sampling(logit_bias={N_VOCAB: 1.0})}, SamplingError, "logit_bias"),
        ({"ids": (1,) * 4096}, ContextFull, "4096 tokens and the context holds 4096"),
    ],
)
def test_bad_requests_are_refused_at_once(
    start: Callable[..., Engine], bad: dict[str, Any], error: type[Exception], words: str
) -> None:
    engine = start(random_model())
    with pytest.raises(error, match=words):
        engine.submit(request(**bad))
    assert reason(list(engine.submit(request()))) == "length"


def test_a_budget_beyond_the_context_is_clamped(start: Callable[..., Engine]) -> None:
    engine = start(Scripted([[1] * 90], eos=358), context_tokens=70)
    events = list(engine.submit(request(max_tokens=500)))
    assert isinstance(events[0], Started)
    assert events[0].max_tokens == len(ids_of(events)) == 10


def test_a_full_queue_refuses(start: Callable[..., Engine]) -> None:
    gate = threading.Event()
    engine = start(Scripted([[1]], eos=358, on_step=lambda _s: gate.wait(10) and None), max_waiting=1)
    running = engine.submit(request())
    while engine.state != "busy" or engine.waiting:
        time.sleep(0.001)
    waiting = engine.submit(request())
    with pytest.raises(EngineBusy) as caught:
        engine.submit(request())
    assert caught.value.waiting == 1
    gate.set()
    assert reason(list(running)) == reason(list(waiting)) == "length"


# ---- threads ------------------------------------------------------------------------------------------------------


def test_requests_are_served_in_the_order_they_came(start: Callable[..., Engine]) -> None:
    order: list[int] = []

    class Noting(Ids):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def finish(self, reason: FinishReason) -> tuple[Sequence[Event], Finish]:
            order.append(self.n)
            return super().finish(reason)

    engine = start(random_model("qwen3_moe"))
    streams = [engine.submit(request(consumer=Noting(n), max_tokens=2)) for n in range(6)]
    for stream in streams:
        list(stream)
    assert order == list(range(6))


def test_many_threads_get_the_answer_each_would_get_alone(start: Callable[..., Engine]) -> None:
    model = random_model()
    prompts = [(*PROMPT[: 20 + i], 300 + i) for i in range(8)]
    expected = [stock(model, p, 6) for p in prompts]
    engine = start(model)
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = ids_of(list(engine.submit(request(prompts[i], max_tokens=6))))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(8)] == expected


def test_streams_can_be_read_by_many_tasks_of_a_loop(start: Callable[..., Engine]) -> None:
    engine = start(random_model("qwen3_moe"))
    expected = ids_of(list(engine.submit(request(max_tokens=5))))

    async def ask() -> list[int]:
        return ids_of([event async for event in engine.submit(request(max_tokens=5))])

    async def everyone() -> list[list[int]]:
        return list(await asyncio.gather(*(ask() for _ in range(5))))

    assert asyncio.run(everyone()) == [expected] * 5


def test_an_error_reaches_an_asynchronous_reader(start: Callable[..., Engine]) -> None:
    def on_step(_step: int) -> None:
        raise RuntimeError("gone")

    engine = start(Scripted([[1]], eos=358, on_step=on_step))

    async def ask() -> None:
        async for _ in engine.submit(request()):
            pass

    with pytest.raises(GenerationFailed, match="gone"):
        asyncio.run(ask())


def test_calls_run_on_the_engine_thread_and_bring_back_values_and_errors(start: Callable[..., Engine]) -> None:
    engine = start(random_model("qwen3_moe"))
    assert engine.call(lambda: threading.current_thread().name).result(10) == "swiftlet-engine"
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result(10)
    assert engine.state == "ready"


def test_a_background_request_gives_way_and_leaves_what_it_has_read(start: Callable[..., Engine]) -> None:
    model = random_model()
    engine = start(model, prefill_step_size=4)
    long = PROMPT * 8
    background = engine.submit(request(long, max_tokens=0, background=True))
    while not isinstance(next(background), Progress):
        pass
    other = list(engine.submit(request((7, 8, 9), max_tokens=2)))
    assert reason(other) == "length"
    assert reason(list(background)) == "cancelled"
    events = list(engine.submit(request(long, max_tokens=4)))
    assert stats(events).cached_tokens > 0
    assert ids_of(events) == stock(model, long, 4)


def test_what_follows_a_reply_waits_until_nobody_asks_and_may_fail(start: Callable[..., Engine]) -> None:
    model = random_model()
    engine = start(model, idle_seconds=0.02)
    made: list[int] = []

    def then(n: int) -> Request:
        made.append(n)
        if n == 2:
            raise RuntimeError("no template")
        return request((*PROMPT, *range(100 * n, 100 * n + 20)), max_tokens=0)

    def reply(n: int) -> None:
        list(engine.submit(request(max_tokens=2, then=lambda: then(n))))

    reply(1)
    reply(2)  # at once: 1 still waits
    while len(made) < 2 or engine._worker._running is not None:
        time.sleep(0.001)
    assert made == [2, 1], "the last one first"
    assert engine.call(lambda: engine.store.unread((*PROMPT, *range(100, 120)))).result() == 0
    stream = engine.submit(request(max_tokens=5000, then=lambda: then(3)))
    next(stream)
    stream.cancel()
    assert reason(list(stream)) == "cancelled"
    assert not engine._worker._ahead, "a reply that nobody wanted goes on nowhere"


# ---- the end ------------------------------------------------------------------------------------------------------


def test_closing_ends_what_runs_and_refuses_what_waits(start: Callable[..., Engine]) -> None:
    engine = start(Scripted([[1] * 100_000], eos=358, context=10**6))
    running, waiting = engine.submit(request(max_tokens=100_000)), engine.submit(request())
    next(running)
    engine.close()
    assert reason(list(running)) == "cancelled"
    with pytest.raises(EngineClosed):
        list(waiting)
    with pytest.raises(EngineClosed):
        engine.submit(request())
    with pytest.raises(EngineClosed):
        engine.call(lambda: None)
    assert engine.state == "closed"
    engine.close()


def test_a_forgotten_engine_closes_itself_and_frees_its_model() -> None:
    model = random_model("qwen3_moe")
    gone = weakref.ref(model)
    engine = Engine(lambda m=model: (m, tokenizer()))  # type: ignore[misc]
    engine.wait()
    list(engine.submit(request(max_tokens=2)))
    run = engine._run
    del engine, model
    gc.collect()
    assert not run.running
    gc.collect()
    assert gone() is None


def test_engines_one_after_another_share_a_thread(start: Callable[..., Engine]) -> None:
    before = threading.active_count()
    for _ in range(3):
        engine = start(random_model("qwen3_moe"))
        list(engine.submit(request(max_tokens=2)))
        engine.close()
    assert threading.active_count() <= before + 1


def test_no_budget_keeps_no_caches(start: Callable[..., Engine]) -> None:
    engine = start(random_model(), prefix_cache_gb=0)
    for _ in range(2):
        events = list(engine.submit(request(checkpoints=(20, 40))))
        assert stats(events).cached_tokens == 0
    assert len(engine.store) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "close",
    # a process each, with compiled functions: seconds. The one that closes itself at exit is the one users meet.
    ["", pytest.param("engine.close()", marks=pytest.mark.slow)],
)
def test_leaving_the_interpreter_in_the_middle_of_a_reply_is_clean(close: str) -> None:
    """A thread inside MLX at exit aborts the process with 134, and so does one that frees compiled functions there."""
    script = f"""
        import sys
        from talkers import random_model, tokenizer
        from test_engine import request
        from swiftlet_mlx.engine import Engine
        model = random_model()
        engine = Engine(lambda: (model, tokenizer()))
        stream = engine.submit(request(max_tokens=3000))
        for _ in range(5):
            next(stream)
        {close}
        print("leaving")
        sys.exit(7)
    """
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "MLX_DISABLE_COMPILE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent)])
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (run.returncode, run.stdout.strip()) == (7, "leaving"), run.stderr
