"""A scripted model's replies, token by token, become the right events, whatever they are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from talkers import Scripted, chat_template, random_model, tokenizer, until_idle

from swiftlet_mlx.completion import Ask, Completions
from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import ConfigError, ContextFull, MessageError, OptionError
from swiftlet_mlx.events import Event, Finish, Started, Statistics, TextDelta, ThinkingDelta, ToolCall
from swiftlet_mlx.sampling import Sampling

USER = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
TOOL_ASK = Ask(tools=(TOOL,))

Say = Callable[..., Completions]


@pytest.fixture
def say() -> Iterator[Say]:
    """Make a model that says these texts or ids, one reply after another."""
    engines: list[Engine] = []

    def make(
        *replies: str | list[int],
        template: str | None = None,
        xml: bool = False,
        folder: Any = None,
        idle_seconds: float | None = None,
    ) -> Completions:
        words = tokenizer(template, xml=xml)
        scripts = [words.encode(r, add_special_tokens=False) if isinstance(r, str) else r for r in replies]
        model = Scripted(scripts, eos=words.convert_tokens_to_ids("<|im_end|>"))
        engines.append(Engine(lambda: (model, words), idle_seconds=idle_seconds))
        return Completions(engines[-1], folder)

    yield make
    for engine in engines:
        engine.close()


def text(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def thoughts(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ThinkingDelta))


def calls(events: list[Event]) -> list[tuple[int, str, Any]]:
    return [(e.index, e.name, json.loads(e.arguments)) for e in events if isinstance(e, ToolCall)]


def ending(events: list[Event]) -> tuple[str, str | None]:
    assert [type(e) for e in events[-2:]] == [Statistics, Finish]
    assert sum(isinstance(e, Finish) for e in events) == 1
    finish = events[-1]
    assert isinstance(finish, Finish)
    return finish.reason, finish.stop


# ---- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", ["A👍🏽!", "漢字", "x\0y", " hello world", "👨‍👩‍👧‍👦", "  spaces  \n\n", "# Title\n\n- a\n- b\n", ""]
)
def test_the_deltas_are_the_reply(say: Say, reply: str) -> None:
    events = list(say(reply).chat(USER))
    assert text(events) == reply
    assert ending(events) == ("stop", None)


def test_a_character_cut_by_the_budget_shows_nothing_before_the_end(say: Say) -> None:
    completions = say("ok👍")
    events = list(completions.chat(USER, Ask(max_tokens=len(tokenizer().encode("ok")) + 2)))
    shown = [e.text for e in events if isinstance(e, TextDelta)]
    assert "".join(shown) == "ok\ufffd"
    assert all("\ufffd" not in delta for delta in shown[:-1])
    assert ending(events) == ("length", None)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>", "<|im_start|>"])
def test_any_end_token_ends_the_reply_and_none_is_shown(say: Say, end: str) -> None:
    words = tokenizer()
    ids = [*words.encode("done"), words.convert_tokens_to_ids(end), *words.encode("LEAK")]
    events = list(say(ids).chat(USER))
    assert text(events) == "done"
    assert ending(events) == ("stop", None)


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        ({"eos_token_id": 5}, None),
        ({"eos_token_id": [9, 5]}, None),
        ({}, {"eos_token_id": 5}),
        ({"text_config": {"eos_token_id": 5}}, {"eos_token_id": [7]}),
    ],
)
def test_ends_listed_in_either_file_count(say: Say, tmp_path: Path, config: Any, generation: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    events = list(say([70, 71, 5, 72], folder=tmp_path).chat(USER))
    assert text(events) == tokenizer().decode([70, 71])
    assert ending(events)[0] == "stop"


def test_a_truncated_generation_config_is_reported_by_name(say: Say, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5,')
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        say("x", folder=tmp_path)


# ---- stop strings -------------------------------------------------------------------------------------------------


def test_a_stop_string_across_tokens_ends_generation_there(say: Say) -> None:
    completions = say(" hello world and more text")
    events = list(completions.chat(USER, Ask(stop=("lo wo",))))
    assert text(events) == " hel"
    assert ending(events) == ("stop", "lo wo")
    statistics = next(e for e in events if isinstance(e, Statistics))
    assert statistics.generated_tokens <= len(tokenizer().encode(" hello world"))


def test_a_stop_string_across_a_character_that_is_cut_itself(say: Say) -> None:
    reply = "one \u00e9\N{THUMBS UP SIGN} two"
    words = tokenizer()
    assert len(words.encode("\u00e9\N{THUMBS UP SIGN}", add_special_tokens=False)) > 2  # bytes, most of them
    for stop, before in (
        ("\u00e9\N{THUMBS UP SIGN}", "one "),
        ("\N{THUMBS UP SIGN} t", "one \u00e9"),
        ("\u00e9t", None),
    ):
        events = list(say(reply).chat(USER, Ask(stop=(stop,))))
        assert text(events) == (reply if before is None else before)
        assert ending(events) == ("stop", None if before is None else stop)
        assert "\ufffd" not in text(events)


def test_one_of_four_stop_strings_inside_a_token_is_enough(say: Say) -> None:
    words = tokenizer()
    one = words.encode(" assistant", add_special_tokens=False)
    events = list(say(one).chat(USER, Ask(stop=("xx", "sis", "yy", "zz"))))
    assert (text(events), ending(events)) == (" as", ("stop", "sis"))


def test_a_stop_string_counts_in_thoughts_too(say: Say) -> None:
    events = list(say("let me STOP now</think>no", template=chat_template("always")).chat(USER, Ask(stop=("STOP",))))
    assert (thoughts(events), text(events)) == ("let me ", "")
    assert ending(events) == ("stop", "STOP")


def test_what_was_held_back_for_a_stop_string_comes_at_the_end(say: Say) -> None:
    events = list(say("abc\nUse").chat(USER, Ask(stop=("\nUser:",))))
    assert (text(events), ending(events)) == ("abc\nUse", ("stop", None))


# ---- thoughts -----------------------------------------------------------------------------------------------------


def test_thoughts_and_answer_come_apart(say: Say) -> None:
    events = list(say("thinking hard\n</think>\n\nAnswer", template=chat_template("switch")).chat(USER))
    assert (thoughts(events), text(events)) == ("thinking hard", "Answer")
    statistics = next(e for e in events if isinstance(e, Statistics))
    assert 0 < statistics.thinking_tokens < statistics.generated_tokens


def test_a_thought_cut_by_the_budget_is_no_answer(say: Say) -> None:
    events = list(say("thinking hard", template=chat_template("always")).chat(USER, Ask(max_tokens=4)))
    assert text(events) == ""
    assert "thinking hard".startswith(thoughts(events))
    assert thoughts(events)
    assert ending(events) == ("length", None)


def test_no_thinking_makes_the_whole_reply_the_answer(say: Say) -> None:
    for opening in ("switch", "always", "none"):
        events = list(say("Answer", template=chat_template(opening)).chat(USER, Ask(thinking=False)))
        assert (thoughts(events), text(events)) == ("", "Answer")


def test_defaults_follow_whether_the_model_thinks(say: Say) -> None:
    completions = say("x")
    assert completions.defaults(thinking=True).temperature == 0.6
    assert completions.defaults(thinking=False).temperature == 0.7


# ---- tool calls ---------------------------------------------------------------------------------------------------

JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("call", "xml"), [(JSON_CALL, False), (XML_CALL, True)])
@pytest.mark.parametrize("before", ["", "Let me see.\n\n"])
@pytest.mark.parametrize("n", [1, 2])
def test_calls_arrive_whole_and_parsed(say: Say, call: str, xml: bool, before: str, n: int) -> None:
    events = list(say(before + "\n".join([call] * n), xml=xml).chat(USER, TOOL_ASK))
    assert text(events) == before.rstrip()
    assert calls(events) == [(i, "f", {"n": 1}) for i in range(n)]
    assert ending(events)[0] == "tool_calls"
    assert len({e.id for e in events if isinstance(e, ToolCall)}) == n


def test_a_thought_before_a_call_stays_a_thought(say: Say) -> None:
    events = list(say("hm</think>\n\n" + JSON_CALL, template=chat_template("always")).chat(USER, TOOL_ASK))
    assert (thoughts(events), text(events), calls(events)) == ("hm", "", [(0, "f", {"n": 1})])


@pytest.mark.parametrize("bad", ["<tool_call>\n{not json}\n</tool_call>", '<tool_call>{"name": 3}</tool_call>'])
def test_a_malformed_call_is_text(say: Say, bad: str) -> None:
    events = list(say(bad).chat(USER, TOOL_ASK))
    assert (text(events), calls(events), ending(events)[0]) == (bad, [], "stop")


def test_a_cut_call_is_text_and_ends_with_length(say: Say) -> None:
    events = list(say(JSON_CALL).chat(USER, Ask(tools=(TOOL,), max_tokens=6)))
    assert text(events)
    assert JSON_CALL.startswith(text(events))
    assert (calls(events), ending(events)[0]) == ([], "length")


def test_without_tools_a_call_is_only_text(say: Say) -> None:
    events = list(say(JSON_CALL).chat(USER))
    assert (text(events), calls(events)) == (JSON_CALL, [])


def test_tools_are_refused_where_the_template_knows_none(say: Say) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(MessageError, match="knows no tools"):
        say("x", template=plain).chat(USER, TOOL_ASK)


# ---- other ways to ask --------------------------------------------------------------------------------------------


def test_a_reply_can_be_made_to_begin_with_a_text(say: Say) -> None:
    events = list(
        say(' "f", "arguments": {"n": 2}}\n</tool_call>').chat(
            USER, Ask(tools=(TOOL,), reply_start='<tool_call>\n{"name":')
        )
    )
    assert calls(events) == [(0, "f", {"n": 2})]
    events = list(say("world").chat(USER, Ask(reply_start="Hello ")))
    assert text(events) == "Hello world"


def test_plain_text_is_continued_without_a_template(say: Say) -> None:
    completions = say("<think>not a thought</think>")
    for prompt in ("Once upon", [5, 6, 7]):
        events = list(completions.text(prompt))
        assert text(events) == "<think>not a thought</think>"
    with pytest.raises(OptionError, match="list of token ids"):
        completions.text(["a", "b"])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="empty"):
        completions.text("")


def test_log_probabilities_come_with_the_text_they_belong_to(say: Say) -> None:
    events = list(say("A👍b").chat(USER, Ask(logprobs=2, sampling=Sampling())))
    found = [(e.text, e.logprobs) for e in events if isinstance(e, TextDelta)]
    assert [b"".join(p.bytes for p in probs).decode() for _, probs in found] == [t for t, _ in found]
    assert all(len(p.top) == 2 and p.top[0].id == p.id for _, probs in found for p in probs)
    assert (
        sum(len(probs) for _, probs in found) == next(e for e in events if isinstance(e, Statistics)).generated_tokens
    )


def test_a_reply_ends_after_a_sentence_when_its_budget_is_nearly_used(say: Say) -> None:
    reply = "word " * 50 + "end. And then another sentence that never stops"
    n = len(tokenizer().encode(reply[: reply.index(".") + 1]))
    events = list(say(reply).chat(USER, Ask(max_tokens=n + 3, sentence_end=True)))
    assert text(events).endswith("end.")
    assert ending(events)[0] == "length"
    assert not text(list(say(reply).chat(USER, Ask(max_tokens=n + 3)))).endswith("end.")


@pytest.mark.parametrize(
    "ask",
    [{"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": True}, {"stop": "x"}, {"stop": ("",)}, {"stop": (5,)},
     {"stop": ("a",) * 17}, {"logprobs": 21}, {"logprobs": -1}],
)  # fmt: skip
def test_impossible_wishes_are_refused_by_name(ask: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(ask))):
        Ask(**ask)


def test_a_prompt_beyond_the_context_is_refused_with_its_numbers(say: Say) -> None:
    completions = say("x")
    with pytest.raises(ContextFull) as caught:
        completions.chat([{"role": "user", "content": "word " * 5000}])
    assert caught.value.context_tokens == 4096
    assert caught.value.prompt_tokens > 4096


def test_bad_messages_never_reach_the_engine(say: Say) -> None:
    completions = say("fine")
    with pytest.raises(MessageError):
        completions.chat([{"role": "robot", "content": "x"}])
    assert text(list(completions.chat(USER))) == "fine"


def test_a_client_s_next_turn_finds_the_reply_read_as_history(say: Say) -> None:
    """A server's clients send the answer back without its thoughts; meanwhile nobody has asked for anything."""
    completions = say("hm " * 30 + "</think>" + "Hello. " * 30, template=chat_template("switch"), idle_seconds=0.0)
    answer = text(list(completions.chat(USER)))
    until_idle(completions.engine)
    events = list(completions.chat([*USER, {"role": "assistant", "content": answer}, *USER]))
    started = next(e for e in events if isinstance(e, Started))
    assert started.prompt_tokens - started.cached_tokens <= len(completions.render(USER).ids)


def test_what_follows_a_tool_call_is_not_guessed(say: Say) -> None:
    completions = say(JSON_CALL, idle_seconds=0.0)
    statistics = next(e for e in completions.chat(USER, TOOL_ASK) if isinstance(e, Statistics))
    until_idle(completions.engine)
    [timeline] = completions.engine.store._timelines
    assert len(timeline) <= statistics.prompt_tokens + statistics.generated_tokens + 1


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe"])
def test_an_unrelated_conversation_is_answered_as_in_a_fresh_process(kind: str) -> None:
    """Words of one conversation must not reach another, in whatever order they come."""
    model, words = random_model(kind), tokenizer()
    a = [{"role": "user", "content": "You are a helpful assistant, think"}]
    b = [{"role": "user", "content": "You are a quick brown fox"}]
    ask = Ask(sampling=Sampling(), max_tokens=10)

    def answers(*conversations: list[Any]) -> list[str]:
        with Engine(lambda: (model, words)) as engine:
            completions = Completions(engine)
            return [text(list(completions.chat(c, ask))) for c in conversations]

    [alone] = answers(b)
    assert answers(a, b)[1] == alone
    assert answers(b, a, b, a, b)[::2] == [alone] * 3
