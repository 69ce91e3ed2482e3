"""A conversation's next reply depends on its messages alone, and what was read once is not read again."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from talkers import N_VOCAB, Scripted, chat_template, fresh_logits, random_model, tokenizer, until_idle
from tiny import make_checkpoint

from swiftlet_mlx import load
from swiftlet_mlx.completion import Ask, Completions
from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import (
    ContextFull,
    GenerationFailed,
    MessageError,
    OptionError,
    ReadFailed,
    SamplingError,
    SessionBusy,
    SessionFileError,
    WrongModel,
)
from swiftlet_mlx.events import Finish, TextDelta, ThinkingDelta
from swiftlet_mlx.sampling import Sampling
from swiftlet_mlx.session import Session
from swiftlet_mlx.turn import Turn

SMALLEST = 0.0004  # GB: the experts of one token of the tiny checkpoint, a layer at a time
GREEDY = Ask(sampling=Sampling(), max_tokens=6)
LONG = "You are a helpful assistant. " * 16


def talk(session: Session, text: Any, **options: Any) -> Turn:
    turn = session.send(text, **options)
    for _ in turn:
        pass
    return turn


def cached(turn: Turn) -> int:
    assert turn.statistics is not None
    return turn.statistics.cached_tokens


def read(turn: Turn) -> int:
    """Prompt tokens that had to be read."""
    assert turn.statistics is not None
    return turn.statistics.prompt_tokens - turn.statistics.cached_tokens


def next_logits(session: Session) -> tuple[list[float], list[float]]:
    """The logits after the conversation and one more question: by way of the session's caches, and fresh."""
    seen: list[list[float]] = []

    def look(_generated: list[int], logits: mx.array) -> mx.array:
        seen.append(logits.astype(mx.float32).tolist())  # type: ignore[arg-type]
        return logits

    messages = [*session.messages, {"role": "user", "content": "And?"}]
    prompt = session.completions.render(messages, session.ask)
    list(session.completions.answer(prompt, Ask(sampling=Sampling(), max_tokens=1, processors=(look,))))
    model = session.engine.model
    return seen[0], session.engine.call(lambda: fresh_logits(model, prompt.ids)).result()


def assert_same(session: Session) -> None:
    """The logits are those of a fresh pass, but for the order in which float32 sums are rounded."""
    found, fresh = next_logits(session)
    assert max(abs(a - b) for a, b in zip(found, fresh, strict=True)) < 5e-4
    assert found.index(max(found)) == fresh.index(max(fresh))


@pytest.fixture
def opened() -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def make(model: Any = None, opening: str = "none", **options: Any) -> Session:
        words = tokenizer(chat_template(opening))
        options.setdefault("ask", GREEDY)
        options.setdefault("idle_seconds", None)
        sessions.append(Session(model or random_model(), words, **options))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def scripted(*replies: str, **options: Any) -> Scripted:
    words = tokenizer()
    scripts = [words.encode(r, add_special_tokens=False) for r in replies]
    return Scripted(scripts, eos=words.convert_tokens_to_ids("<|im_end|>"), **options)


# ---- talking --------------------------------------------------------------------------------------------------------


def test_a_conversation_grows_by_question_and_answer(opened: Callable[..., Session]) -> None:
    session = opened(scripted("Hello", "World"), system="Be brief.")
    assert talk(session, "Hi").text == "Hello"
    assert talk(session, "And?").text == "World"
    assert session.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "World"},
    ]


def test_thoughts_are_kept_apart_and_the_template_decides_about_them(opened: Callable[..., Session]) -> None:
    session = opened(scripted("hm, well</think>\n\nHello"), opening="switch")
    turn = talk(session, "Hi", max_tokens=99)
    assert (turn.thinking, turn.text) == ("hm, well", "Hello")
    assert session.messages[-1] == {"role": "assistant", "content": "Hello", "reasoning_content": "hm, well"}
    assert "hm, well" not in session.completions.render([*session.messages, {"role": "user", "content": "?"}]).text


def test_tool_calls_go_into_the_history_and_their_results_are_sent_back(opened: Callable[..., Session]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    session = opened(scripted('<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', "It is 2."))
    turn = talk(session, "Hi", tools=(tool,), max_tokens=99)
    [call] = turn.tool_calls
    assert session.messages[-1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"n": 1}}
    turn = session.send({"role": "tool", "content": "2", "tool_call_id": call.id}, max_tokens=99)
    list(turn)
    assert turn.text == "It is 2."
    assert [m["role"] for m in session.messages] == ["user", "assistant", "tool", "assistant"]


def test_options_of_one_turn_do_not_stick(opened: Callable[..., Session]) -> None:
    session = opened(scripted("one two three"))
    assert talk(session, "Hi", stop=("two",)).text == "one "
    assert talk(session, "Hi", max_tokens=99).text == "one two three"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 9}, SamplingError),
        ({"tempo": 1}, SamplingError),
        ({"max_tokens": 0}, OptionError),
        ({"seed": 2**64}, SamplingError),
        ({"logit_bias": {N_VOCAB: 1.0}}, SamplingError),  # out of range it would end the process
    ],
)
def test_bad_options_are_refused_and_leave_no_trace(
    opened: Callable[..., Session], options: dict[str, Any], error: type[Exception]
) -> None:
    session = opened(scripted("Hello"))
    with pytest.raises(error, match=next(iter(options))):
        session.send("Hi", **options)
    assert session.messages == []
    assert talk(session, "Hi").text == "Hello"


@pytest.mark.parametrize("message", [None, 5, [], ["Hi"], [{"role": "user"}], {"role": "robot", "content": "Hi"}])
def test_what_is_no_message_is_refused_and_leaves_no_trace(opened: Callable[..., Session], message: Any) -> None:
    session = opened(scripted("Hello"))
    with pytest.raises(MessageError):
        session.send(message)
    assert session.messages == []
    talk(session, "Hi")
    with pytest.raises(MessageError, match="found NoneType"):
        session.edit(0, None)  # type: ignore[arg-type]
    assert session.messages[0]["content"] == "Hi"


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("", ""),
        (" \n", " \n"),
        ("a\0b", "a\0b"),
        ("half of an emoji \ud83d", "half of an emoji \ufffd"),
        ("\ud83d\udc4d", "\N{THUMBS UP SIGN}"),
        ("x" * 300, "x" * 300),
    ],
)
def test_odd_messages_are_answered_and_kept(
    opened: Callable[..., Session], tmp_path: Path, message: str, kept: str
) -> None:
    session = opened(system="S" + message)
    talk(session, message, max_tokens=1)
    session.edit(1, message)
    list(session.regenerate(max_tokens=1))
    session.note(tmp_path / "b")
    with Session.load(tmp_path / "b", session.completions) as noted:
        assert noted.messages == session.messages
    assert session.system == "S" + kept
    session.save(tmp_path / "a")
    with Session.load(tmp_path / "a", session.completions) as loaded:
        assert loaded.messages == session.messages
        assert loaded.messages[-2]["content"] == kept
    assert_same(session)


def test_a_turn_can_be_read_in_a_loop_of_asyncio(opened: Callable[..., Session]) -> None:
    session = opened(scripted("Hello"))

    async def ask() -> str:
        turn = session.send("Hi")
        return "".join([e.text async for e in turn if isinstance(e, TextDelta)])

    assert asyncio.run(ask()) == "Hello"
    assert session.messages[-1]["content"] == "Hello"


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_a_task_that_stops_listening_stops_the_answer(opened: Callable[..., Session], how: str) -> None:
    """As when a web client goes away: what it was given is kept, and the engine is free."""
    session = opened(scripted("word " * 300, on_step=lambda _: time.sleep(0.002)))

    async def listen(turn: Turn) -> None:
        async for event in turn:
            if how == "break" and isinstance(event, TextDelta):
                break

    async def main() -> None:
        task = asyncio.create_task(listen(turn := session.send("Hi", max_tokens=2000)))
        while not turn.text:
            await asyncio.sleep(0.002)
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        while not turn.done:
            await asyncio.sleep(0.002)

    asyncio.run(main())
    assert session.messages[1]["content"].startswith("w")
    assert len(session.messages[1]["content"]) < 1500
    assert talk(session, "Hi again", max_tokens=3).finish == Finish("length")


def test_a_turn_stopped_by_one_thread_while_another_reads_it_is_kept_in_order(opened: Callable[..., Session]) -> None:
    """A window: one thread shows the answer, the main one stops it and asks the next question at once."""
    story = " ".join(str(i) for i in range(400))
    session = opened(scripted(story, on_step=lambda _: time.sleep(0.0002)))
    for n in range(12):
        turn = session.send("Tell me", max_tokens=2000)
        reader = threading.Thread(target=list, args=(turn,))
        reader.start()
        while len(turn.text) < 40:
            time.sleep(0.0005)
        session.cancel()
        talk(session, "Stop", max_tokens=3)
        reader.join()
        assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2 * (n + 1)
        assert story.startswith(session.messages[-3]["content"])
        assert len(session.messages[-3]["content"]) >= 40


def test_callers_on_many_threads_get_what_they_ask_for_or_are_told_to_wait(opened: Callable[..., Session]) -> None:
    session = opened(MODELS["qwen3_moe"])
    unforeseen: list[BaseException] = []
    done = Counter[str]()

    async def ask_and_go(rng: random.Random) -> None:
        async def read() -> None:
            async for _ in session.send("Hi"):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(rng.random() * 0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # while the first is still being obeyed
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            raise task.exception() or AssertionError

    def work(n: int) -> None:
        rng = random.Random(n)
        what: dict[str, Callable[[], object]] = {
            "send": lambda: talk(session, "Hello"),
            "leave": lambda: next(iter(session.send("Hello"))),
            "async": lambda: asyncio.run(ask_and_go(rng)),
            "cancel": session.cancel,
            "undo": session.undo,
            "regenerate": lambda: list(session.regenerate()),
            "edit": lambda: session.edit(-1, "x"),
            "prepare": session.prepare,
        }
        for _ in range(12):
            name = rng.choice(sorted(what))
            try:
                what[name]()
                done[name] += 1
            except (SessionBusy, MessageError):
                pass
            except BaseException as error:
                unforeseen.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert unforeseen == []
    assert done["send"] + done["regenerate"] > 0
    assert talk(session, "Bye").text
    assert_same(session)


def test_penalties_count_the_whole_reply_and_the_end_waits_for_the_minimum(opened: Callable[..., Session]) -> None:
    session = opened(scripted("a" * 300))
    said = talk(session, "Hi", max_tokens=120, frequency_penalty=2.0, min_tokens=120)
    assert said.statistics is not None
    counts = Counter(said.statistics.ids)
    assert len(said.statistics.ids) == 120
    assert max(counts.values()) <= 11, "20 of logit is 10 repeats, however long ago they were"


def test_a_session_stands_on_an_engine_that_others_use_too() -> None:
    model, words = scripted("Hello"), tokenizer()
    with Engine(lambda: (model, words)) as engine:
        one, two = Session(engine), Session(Completions(engine))
        assert talk(one, "Hi").text == talk(two, "Hi").text == "Hello"
        one.close()
        assert talk(two, "Hi").text == "Hello", "closing a session leaves a shared engine running"


def test_a_bare_model_needs_its_tokenizer() -> None:
    with pytest.raises(OptionError, match=r"Session\(model, tokenizer\)"):
        Session(random_model())


# ---- changing the history ------------------------------------------------------------------------------------------


def test_undo_gives_the_question_back(opened: Callable[..., Session]) -> None:
    session = opened(scripted("a", "b"))
    talk(session, "one")
    talk(session, "two")
    assert session.undo() == "two"
    assert [m["content"] for m in session.messages] == ["one", "a"]
    session.undo()
    with pytest.raises(MessageError, match="Nothing has been asked"):
        session.undo()


def test_edit_drops_what_follows_and_regenerate_answers(opened: Callable[..., Session]) -> None:
    session = opened(scripted("a", "b", "c"))
    talk(session, "one")
    talk(session, "two")
    session.edit(0, "uno")
    assert [m["content"] for m in session.messages] == ["uno"]
    list(session.regenerate())
    assert [m["content"] for m in session.messages] == ["uno", "c"]
    session.edit(-1, "said otherwise")
    assert session.messages[-1] == {"role": "assistant", "content": "said otherwise"}
    thought = {"role": "assistant", "content": "a", "reasoning_content": "what led to it"}
    with opened(scripted("d"), messages=[{"role": "user", "content": "one"}, thought]) as other:
        other.edit(1, "said otherwise")
        assert other.messages[-1] == {"role": "assistant", "content": "said otherwise"}  # no thought has led to that
    with pytest.raises(MessageError, match="no message 7"):
        session.edit(7, "x")


def test_reset_keeps_the_system_prompt_and_it_can_be_changed(opened: Callable[..., Session]) -> None:
    session = opened(scripted("a"), system="S")
    talk(session, "one")
    session.reset()
    assert session.messages == [{"role": "system", "content": "S"}]
    session.system = "T"
    assert session.system == "T"
    talk(session, "one")
    session.system = ""
    assert [m["role"] for m in session.messages] == ["user", "assistant"]


def test_the_oldest_exchange_can_be_dropped(opened: Callable[..., Session]) -> None:
    session = opened(scripted("a", "b"), system="S")
    talk(session, "one")
    talk(session, "two")
    assert [m["content"] for m in session.drop_oldest()] == ["one", "a"]
    assert [m["content"] for m in session.messages] == ["S", "two", "b"]
    session.drop_oldest()
    with pytest.raises(MessageError, match="no exchange"):
        session.drop_oldest()


def test_a_full_context_is_said_before_anything_runs(opened: Callable[..., Session]) -> None:
    session = opened(scripted("a", context=200))
    talk(session, "word " * 8)
    with pytest.raises(ContextFull, match="Drop the oldest") as caught:
        session.send("word " * 60)
    assert caught.value.context_tokens == 200
    assert len(session.messages) == 2
    session.drop_oldest()
    assert talk(session, "word").text == "a"


# ---- turns that end early --------------------------------------------------------------------------------------------


def test_a_cancelled_answer_stays_as_far_as_it_was_given_out(opened: Callable[..., Session]) -> None:
    gate = threading.Event()
    session = opened(scripted("Hello world, the quick brown fox", on_step=lambda i: i < 4 or gate.wait(10)))
    turn = session.send("Hi", max_tokens=50)
    shown = ""
    for event in turn:
        if isinstance(event, TextDelta):
            shown += event.text
            if len(shown) > 3:
                session.cancel()
                gate.set()
    assert turn.finish == Finish("cancelled")
    assert session.messages[-1] == {"role": "assistant", "content": turn.text}
    assert 0 < len(turn.text) < 30


@pytest.mark.parametrize("when", ["before", "thinking"])
def test_a_turn_cancelled_before_any_answer_is_taken_back(opened: Callable[..., Session], when: str) -> None:
    session = opened(scripted("hm hm hm hm hm</think>Hello"), opening="always", system="S")
    turn = session.send("Hi", max_tokens=50)
    if when == "before":
        turn.cancel()
        turn.close()
    else:
        for event in turn:
            if isinstance(event, ThinkingDelta):
                break
    assert turn.done
    if turn.text == "":  # the model may have been faster than the cancellation
        assert session.messages == [{"role": "system", "content": "S"}]


def test_a_thought_cut_by_the_budget_is_not_kept_as_an_answer(opened: Callable[..., Session]) -> None:
    session = opened(scripted("hm hm hm hm hm</think>Hello"), opening="always")
    turn = talk(session, "Hi", max_tokens=3)
    assert turn.finish == Finish("length")
    assert session.messages == []


def test_leaving_the_loop_stops_the_answer(opened: Callable[..., Session]) -> None:
    session = opened(scripted("word " * 900))
    turn = session.send("Hi", max_tokens=2000)
    for event in turn:
        if isinstance(event, TextDelta):
            break
    assert turn.finish == Finish("cancelled")
    assert turn.statistics is not None
    assert turn.statistics.generated_tokens < 900
    assert session.messages[-1]["content"] == turn.text


def test_a_turn_that_is_going_on_is_not_disturbed(opened: Callable[..., Session]) -> None:
    gate = threading.Event()
    session = opened(scripted("Hello", on_step=lambda _i: gate.wait(10)))
    turn = session.send("Hi")
    for change in (
        session.undo,
        session.reset,
        session.regenerate,
        lambda: session.send("x"),
        lambda: session.edit(0, ""),
    ):
        with pytest.raises(SessionBusy):
            change()
    gate.set()
    list(turn)
    assert session.messages[-1]["content"] == "Hello"


def test_a_cancelled_turn_that_nobody_reads_makes_way(opened: Callable[..., Session]) -> None:
    session = opened(scripted("word " * 900))
    turn = session.send("Hi", max_tokens=2000)
    session.cancel()
    assert talk(session, "Hi again", max_tokens=3).finish == Finish("length")
    assert turn.done


def test_a_failed_turn_is_taken_back_and_the_next_one_works(opened: Callable[..., Session]) -> None:
    failing = [True]

    def on_step(step: int) -> None:
        if failing[0] and step == 1:
            raise OSError("layer 3 cannot be read")

    session = opened(scripted("Hello", on_step=on_step))
    with pytest.raises(GenerationFailed, match="layer 3"):
        talk(session, "Hi")
    assert session.messages == []
    failing[0] = False
    assert talk(session, "Hi").text == "Hello"


def test_cancelling_frees_the_engine_within_a_second(opened: Callable[..., Session]) -> None:
    session = opened(random_model(), prefill_step_size=32)
    turn = session.send("word " * 700, max_tokens=3000)
    next(iter(turn._stream))
    started = time.perf_counter()
    turn.close()
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize("when", ["prompt", "reply"])
def test_a_failed_read_of_an_expert_costs_that_turn_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A streamed model with the smallest pool, so that every token reads; the next answer is as if nothing had been."""
    model, words = load(make_checkpoint(tmp_path / "model", tokenizer=True), cache_gb=SMALLEST)
    failing = [False]
    whole = model.pools.source.read

    def read(layer: int, *args: Any) -> Any:
        if failing[0] and layer == 2:
            raise ReadFailed("layer 2, expert 5: wanted 9 bytes, got 4")
        return whole(layer, *args)

    monkeypatch.setattr(model.pools.source, "read", read)
    ask = Ask(sampling=Sampling(min_tokens=20), max_tokens=20)
    with Session(model, words, ask=ask) as session:
        talk(session, "Hi")
        before = session.messages
        turn = session.send("And then?") if when == "reply" else None
        heard = []
        with pytest.raises(ReadFailed, match="layer 2, expert 5"):  # noqa: PT012 - it may fail at either place
            failing[0] = when == "prompt"
            for event in turn or session.send("And then?"):
                heard.append(event)
                failing[0] |= isinstance(event, TextDelta)
        failing[0] = False
        assert any(isinstance(e, TextDelta) for e in heard) == (when == "reply")
        assert session.messages == before
        assert session.engine.state == "ready"
        assert_same(session)
        again = talk(session, "And then?").text
        session.engine.call(session.engine.store.clear).result()
        assert talk(Session(session.completions, messages=before, ask=ask), "And then?").text == again


def test_the_same_seed_gives_the_same_text_at_any_pool_size(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", tokenizer=True)
    texts = set()
    for size in (SMALLEST, 1.0):
        with Session(*load(folder, cache_gb=size), ask=Ask(max_tokens=30)) as session:
            texts.add(talk(session, "Hi", temperature=1.5, seed=7, min_tokens=30).text)
    assert len(texts) == 1


# ---- what need not be read again ------------------------------------------------------------------------------------

KINDS = ["qwen3_next", "qwen3_5_moe", "qwen3_moe"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_follow_up_reads_its_own_turn_and_a_bounded_tail(opened: Callable[..., Session], kind: str) -> None:
    session = opened(random_model(kind))
    first = talk(session, "word " * 40)
    assert cached(first) == 0
    second = talk(session, "Hi")
    alone = len(session.completions.render([{"role": "user", "content": "Hi"}]).ids)
    answer = len(tokenizer().encode(first.text))
    assert read(second) <= alone + answer + 8
    assert_same(session)


def test_a_follow_up_reads_nothing_twice_when_the_answer_comes_back_as_the_same_tokens(
    opened: Callable[..., Session],
) -> None:
    session = opened(scripted("Hello world.", "b"))
    talk(session, "word " * 150, max_tokens=99)
    alone = len(session.completions.render([{"role": "user", "content": "Hi"}]).ids)
    assert read(talk(session, "Hi")) <= alone + 2, "the end of the turn and its newline are new"


def test_regenerate_undo_and_edit_go_back_to_a_checkpoint(opened: Callable[..., Session]) -> None:
    session = opened()
    talk(session, "word " * 40)
    talk(session, "Hello " * 60)
    again = session.regenerate()
    list(again)
    assert read(again) <= 8
    session.undo()
    assert read(talk(session, "Other words")) < 60
    session.edit(-2, "Once more")
    again = session.regenerate()
    list(again)
    assert read(again) < 60
    assert_same(session)


def test_a_long_system_prompt_is_read_once_for_all_conversations() -> None:
    model, words = random_model(), tokenizer()
    with Engine(lambda: (model, words)) as engine:
        completions = Completions(engine)
        one = Session(completions, system=LONG, ask=GREEDY)
        two = Session(completions, system=LONG, ask=GREEDY)
        talk(one, "Hello")
        turn = talk(two, "Something else entirely")
        assert cached(turn) > 64
        assert read(turn) < 40
        assert_same(one)
        assert_same(two)


def test_thoughts_that_the_template_strips_cost_the_answer_not_the_history(opened: Callable[..., Session]) -> None:
    session = opened(scripted("hm " * 40 + "</think>Hello world.", "x</think>b"), opening="switch")
    talk(session, "word " * 150, max_tokens=300)
    second = talk(session, "Hi", max_tokens=300)
    assert cached(second) > 150
    assert read(second) < 40


def test_idle_time_can_be_used_to_read_the_stripped_history(opened: Callable[..., Session]) -> None:
    session = opened(scripted("hm " * 40 + "</think>" + "Hello world. " * 20, "x</think>b"), opening="switch")
    talk(session, "Hi", max_tokens=300)
    assert list(session.prepare() or ()), "it can be waited for"
    second = talk(session, "Hi", max_tokens=300)
    alone = len(session.completions.render([{"role": "user", "content": "Hi"}]).ids)
    assert read(second) <= alone


def test_an_engine_reads_the_stripped_history_when_nobody_asks(opened: Callable[..., Session]) -> None:
    replies = ("hm " * 40 + "</think>" + "Hello world. " * 20, "x</think>b")
    session = opened(scripted(*replies), opening="switch", idle_seconds=0.0)
    talk(session, "Hi", max_tokens=300)
    until_idle(session.engine)
    alone = len(session.completions.render([{"role": "user", "content": "Hi"}]).ids)
    assert read(talk(session, "Hi", max_tokens=300)) <= alone


def test_nothing_is_read_ahead_that_the_budget_does_not_hold(opened: Callable[..., Session]) -> None:
    session = opened(random_model(), prefix_cache_gb=1e-7, idle_seconds=0.0)
    talk(session, "Hi")
    assert not session.engine._worker._ahead
    until_idle(session.engine)
    assert len(session.engine.store) == 0


def test_the_same_seed_gives_the_same_answer_whatever_was_cached(opened: Callable[..., Session]) -> None:
    session = opened()
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    talk(session, "Hello", **options)
    before = talk(session, "Again", **options).text
    again = session.regenerate(**options)
    list(again)
    fresh = opened(messages=session.messages[:2])
    assert again.text == before == talk(fresh, "Again", **options).text


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_conversation_goes_on_without_reading_it_again(
    opened: Callable[..., Session], kind: str, tmp_path: Path
) -> None:
    session = opened(random_model(kind), system=LONG)
    talk(session, "word " * 25)
    talk(session, "Hello")
    file = tmp_path / "talk.session"
    session.save(file)
    expected = talk(session, "And then?")
    with Session.load(file, random_model(kind), tokenizer(), ask=GREEDY) as loaded:
        assert loaded.messages == session.messages[:-2]
        turn = talk(loaded, "And then?")
        assert turn.text == expected.text
        assert read(turn) == read(expected)
        assert_same(loaded)
        loaded.undo()
        loaded.undo()
        assert cached(talk(loaded, "Back to the first")) > 100
        assert_same(loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["talk.session"], "no half-written files are left"


# ---- beside the file ------------------------------------------------------------------------------------------------


def test_what_was_noted_after_a_turn_outlives_a_conversation_that_was_never_saved(
    opened: Callable[..., Session], tmp_path: Path
) -> None:
    model, file = random_model(), tmp_path / "talk"
    session = opened(model)
    assert not Session.is_saved(file)
    talk(session, "Hi")
    session.note(file)
    assert [p.name for p in tmp_path.iterdir()] == ["talk.unsaved"]
    assert Session.is_saved(file)
    with Session.load(file, model, tokenizer(), ask=GREEDY) as loaded:
        assert loaded.messages == session.messages
        assert_same(loaded)
        loaded.save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["talk"]


def test_what_was_noted_after_saving_goes_on_from_the_saved_caches(
    opened: Callable[..., Session], tmp_path: Path
) -> None:
    model, file = random_model(), tmp_path / "talk"
    session = opened(model)
    talk(session, "word " * 40)
    session.save(file)
    talk(session, "And then?")
    session.note(file)
    with Session.load(file, model, tokenizer(), ask=GREEDY) as loaded:
        assert loaded.messages == session.messages
        assert cached(talk(loaded, "Hi")) > 100
        assert_same(loaded)


def test_a_note_left_behind_brings_nothing_back(opened: Callable[..., Session], tmp_path: Path) -> None:
    """A kill between the writing of the file and the removal of the note."""
    model, file = random_model(), tmp_path / "talk"
    session = opened(model)
    talk(session, "one")
    talk(session, "two")
    session.note(file)
    left = (tmp_path / "talk.unsaved").read_bytes()
    session.undo()
    session.save(file)
    (tmp_path / "talk.unsaved").write_bytes(left)
    with Session.load(file, model, tokenizer(), ask=GREEDY) as loaded:
        assert [m["content"] for m in loaded.messages][::2] == ["one"]


def test_a_damaged_note_and_one_of_another_model_are_refused_by_name(
    opened: Callable[..., Session], tmp_path: Path
) -> None:
    session = opened(random_model(seed=0))
    talk(session, "Hi")
    session.note(tmp_path / "talk")
    with pytest.raises(WrongModel, match=r"talk\.unsaved"):
        Session.load(tmp_path / "talk", random_model(seed=1), tokenizer())
    note = tmp_path / "talk.unsaved"
    whole = note.read_bytes()
    for damaged in (
        whole[:-2],
        b"[]",
        b"{}",
        b"[" * 100_000,
        whole.replace(b'"version": 2', b'"version": 9'),
        whole.replace(b'"Hi"', b'"Ho"'),
    ):
        assert damaged != whole
        note.write_bytes(damaged)
        with pytest.raises(SessionFileError, match=r"talk\.unsaved is damaged"):
            Session.load(tmp_path / "talk", session.completions)
    with pytest.raises(SessionFileError, match="cannot be noted"):
        session.note(tmp_path / "no" / "such" / "folder")


def test_an_empty_conversation_can_be_saved(opened: Callable[..., Session], tmp_path: Path) -> None:
    model = random_model()
    opened(model, system="S").save(tmp_path / "a")
    with Session.load(tmp_path / "a", model, tokenizer(), ask=GREEDY) as loaded:
        assert loaded.system == "S"
        assert_same(loaded)


def test_another_model_is_refused_by_name(opened: Callable[..., Session], tmp_path: Path) -> None:
    session = opened(random_model(seed=0))
    talk(session, "Hi")
    session.save(tmp_path / "a")
    for other in (random_model(seed=1), random_model("qwen3_moe")):
        with pytest.raises(WrongModel, match="another model"):
            Session.load(tmp_path / "a", other, tokenizer())


def damage(data: bytes, how: str) -> bytes:
    middle = len(data) - 2000
    return {
        "empty": b"",
        "cut by one byte": data[:-1],
        "cut in the header": data[:100],
        "one bit flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "other text": b"hello, this is no session at all " * 9,
        "other version": data.replace(b'\\"version\\": 2', b'\\"version\\": 7'),
        "no such key": data.replace(b"swiftlet_session", b"swiftlet_sessiom"),
        "ids changed": data.replace(b'\\"ids\\": [', b'\\"ids\\": [7,'),
    }[how]


@pytest.mark.parametrize(
    "how",
    ["empty", "cut by one byte", "cut in the header", "one bit flipped", "other text", "other version", "no such key",
     "ids changed"],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_name(opened: Callable[..., Session], tmp_path: Path, how: str) -> None:
    model = random_model()
    session = opened(model)
    talk(session, "Hi")
    file = tmp_path / "a.session"
    session.save(file)
    whole = file.read_bytes()
    file.write_bytes(damage(whole, how))
    assert file.read_bytes() != whole
    with pytest.raises(SessionFileError, match=r"a\.session"):
        Session.load(file, model, tokenizer())


def test_whichever_bit_of_a_file_flips_it_is_refused(opened: Callable[..., Session], tmp_path: Path) -> None:
    session = opened()
    talk(session, "Hi")
    file = tmp_path / "a.session"
    session.save(file)
    whole = file.read_bytes()
    assert whole.index(b"swiftlet_session") < 2000
    for at in [*range(0, 2000, 23), *range(2000, len(whole), 997)]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(SessionFileError, match=r"a\.session"):
            Session.load(file, session.completions)


def test_a_file_of_an_older_version_is_called_that(opened: Callable[..., Session], tmp_path: Path) -> None:
    session = opened()
    record = {"version": 1, "model": session.completions.fingerprint(), "messages": [], "ids": []}
    mx.save_safetensors(
        str(tmp_path / "old.safetensors"), {"empty": mx.zeros(1)}, {"swiftlet_session": json.dumps(record)}
    )
    with pytest.raises(SessionFileError, match=r"old\.safetensors is a conversation of version 1"):
        Session.load(tmp_path / "old.safetensors", session.completions)


def test_a_full_disk_is_called_that(
    opened: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened()
    talk(session, "Hi")

    def full(*_: Any) -> None:
        raise RuntimeError("[write] Unable to write 386 bytes to file.")  # all that MLX says

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(SessionFileError, match=r"a: \[write\] Unable"):
        session.save(tmp_path / "a")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(SessionFileError, match=r"a: no space left \(\d+ bytes are needed, 100 are free\)"):
        session.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_and_a_missing_folder_are_reported(opened: Callable[..., Session], tmp_path: Path) -> None:
    model = random_model()
    with pytest.raises(SessionFileError, match="nowhere"):
        Session.load(tmp_path / "nowhere", model, tokenizer())
    with pytest.raises(SessionFileError, match="cannot be saved"):
        opened(model).save(tmp_path / "no" / "such" / "folder")


def test_saving_over_an_older_file_leaves_it_whole_if_it_fails(
    opened: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened()
    talk(session, "Hi")
    session.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SessionFileError, match="No space left"):
        session.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


# ---- whatever happens ------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
MODELS = {kind: random_model(kind) for kind in ("qwen3_next", "qwen3_moe")}


class Walk(RuleBasedStateMachine):
    """Random walks over everything a user can do: the next reply is always that of a fresh pass over the messages."""

    @initialize(
        kind=st.sampled_from(sorted(MODELS)),
        opening=st.sampled_from(["none", "switch"]),
        budget=st.sampled_from([1.0, 150e-6]),
        system=st.sampled_from([None, LONG]),
        tools=st.sampled_from([(), (TOOL,)]),
        idle_seconds=st.sampled_from([None, 0.0]),
    )
    def begin(
        self, kind: str, opening: str, budget: float, system: str | None, tools: Any, idle_seconds: float | None
    ) -> None:
        self.engine = Engine(
            lambda: (MODELS[kind], tokenizer(chat_template(opening))),
            prefix_cache_gb=budget, prefill_step_size=16, idle_seconds=idle_seconds,
        )  # fmt: skip
        completions, ask = Completions(self.engine), replace(GREEDY, tools=tools)
        self.session, self.other = (Session(completions, system=system, ask=ask) for _ in range(2))

    @rule()
    def turn_to_the_other_conversation(self) -> None:
        self.session, self.other = self.other, self.session

    @rule(
        text=st.sampled_from(["Hi", "Hello world, the quick brown fox", "What is the answer?"]), seed=st.integers(0, 9)
    )
    def send(self, text: str, seed: int) -> None:
        talk(self.session, text, temperature=1.0, seed=seed)

    @rule(thought=st.sampled_from([{}, {"reasoning_content": "the lazy dog"}]))
    def use_a_tool(self, thought: dict[str, str]) -> None:
        function = {"name": "look", "arguments": '{"at": "the fox"}'}
        call = {"id": "c", "type": "function", "function": function}
        asked = {"role": "user", "content": "What is the answer?"}
        answered = {"role": "assistant", "content": "It is", "tool_calls": [call], **thought}
        talk(self.session, [asked, answered, {"role": "tool", "tool_call_id": "c", "content": "forty two"}])

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file, store = Path(folder, "talk"), self.engine.store
            self.session.save(file)
            self.engine.call(store.clear).result()
            loaded = Session.load(file, self.session.completions, ask=self.session.ask)
        assert loaded.messages == self.session.messages
        self.session = loaded

    @precondition(lambda self: any(m["role"] == "user" for m in self.session.messages))
    @rule()
    def drop_the_oldest(self) -> None:
        self.session.drop_oldest()

    @rule(system=st.sampled_from(["", LONG, "Hello"]))
    def set_the_system_prompt(self, system: str) -> None:
        self.session.system = system

    @rule(after=st.integers(0, 4))
    def cancel(self, after: int) -> None:
        turn = self.session.send("You are a helpful assistant", max_tokens=40, temperature=1.0, seed=after)
        events = iter(turn)
        for _ in range(after):
            next(events, None)
        turn.close()

    @precondition(lambda self: any(m["role"] == "user" for m in self.session.messages))
    @rule()
    def undo(self) -> None:
        self.session.undo()

    @precondition(lambda self: any(m["role"] == "user" for m in self.session.messages))
    @rule(seed=st.integers(0, 9))
    def regenerate(self, seed: int) -> None:
        list(self.session.regenerate(temperature=1.0, seed=seed))

    @precondition(lambda self: self.session.messages)
    @rule(n=st.integers(0, 9), text=st.sampled_from(["Once more", "the lazy dog"]))
    def edit(self, n: int, text: str) -> None:
        self.session.edit(n % len(self.session.messages), text)

    @rule()
    def prepare(self) -> None:
        self.session.prepare()

    @rule()
    def reset(self) -> None:
        self.session.reset()

    @invariant()
    def the_next_reply_is_that_of_a_fresh_pass(self) -> None:
        assert_same(self.session)
        store = self.engine.store
        assert self.engine.call(lambda: store.nbytes).result() <= store.budget_bytes

    def teardown(self) -> None:
        self.engine.close()


Walk.TestCase.settings = settings(
    max_examples=5, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWalk = Walk.TestCase


def test_saved_files_are_ordinary_safetensors(opened: Callable[..., Session], tmp_path: Path) -> None:
    session = opened()
    talk(session, "Hi")
    session.save(tmp_path / "a.safetensors")
    arrays, metadata = mx.load(str(tmp_path / "a.safetensors"), return_metadata=True)  # type: ignore[misc]
    record = json.loads(metadata["swiftlet_session"])  # type: ignore[call-overload,index]
    assert record["messages"] == session.messages
    assert arrays
