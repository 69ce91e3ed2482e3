"""Conversations in every form clients send come out as the template's own text, or are refused by their place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from talkers import chat_template, tokenizer

from swiftlet_mlx.errors import MessageError, NoChatTemplate
from swiftlet_mlx.template import MIN_SHARED_TOKENS, ChatTemplate

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def template(opening: str = "none", *, strict: bool = True, xml: bool = False) -> ChatTemplate:
    return ChatTemplate(tokenizer(chat_template(opening, strict=strict, xml=xml)))


def system(text: str, role: str = "system") -> dict[str, str]:
    return {"role": role, "content": text}


def called(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_the_prompt_is_what_the_tokenizer_itself_renders() -> None:
    inner = tokenizer()
    messages = [system("Be brief."), USER, ANSWER, USER]
    prompt = ChatTemplate(inner).render(messages)
    assert prompt.text == inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert list(prompt.ids) == inner.apply_chat_template(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    "messages",
    [
        [system("one"), USER, ANSWER, system("two"), USER],
        [system("one", "developer"), USER, ANSWER, system("two"), USER],
        [system("one"), system("two"), USER, ANSWER, USER],
        [USER, ANSWER, system("one"), system("two", "developer"), USER],
    ],
)
def test_system_text_anywhere_goes_to_the_front_in_order(messages: list[dict[str, Any]]) -> None:
    expected = template().render([system("one\n\ntwo"), USER, ANSWER, USER])
    assert template().render(messages).text == expected.text


def test_a_template_that_takes_system_messages_anywhere_gets_them_there() -> None:
    text = template(strict=False).render([USER, ANSWER, system("later", "developer"), USER]).text
    assert text.index("Hello") < text.index("<|im_start|>system\nlater")


def test_a_template_without_system_messages_gets_them_with_the_first_question() -> None:
    plain = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    assert ChatTemplate(tokenizer(plain)).render([system("S"), USER]).text == "[user]S\n\nHi"


def test_a_template_that_drops_system_messages_silently_still_gets_them() -> None:
    plain = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    assert ChatTemplate(tokenizer(plain)).render([system("S"), USER]).text == "[user]S\n\nHi"


@pytest.mark.parametrize("arguments", ["{}", "", None, {}, "  "])
def test_empty_arguments_in_any_form_render_as_none(arguments: Any) -> None:
    assert template().render(called(arguments)).text == template().render(called({})).text
    assert '"arguments": {}' in template().render(called(arguments)).text


@pytest.mark.parametrize("xml", [False, True])
def test_arguments_as_text_render_as_the_object_they_are(xml: bool) -> None:
    made = template(xml=xml)
    assert made.render(called('{"a": 1}')).text == made.render(called({"a": 1})).text


@pytest.mark.parametrize("arguments", ["[1]", '{"a":', "7", 7, [1]])
def test_arguments_that_are_no_object_are_refused_by_place(arguments: Any) -> None:
    with pytest.raises(MessageError, match="Message 1 calls f") as caught:
        template().render(called(arguments))
    assert caught.value.index == 1


def test_a_template_that_wants_arguments_as_text_gets_text() -> None:
    plain = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
    )
    made = ChatTemplate(tokenizer(plain))
    assert made.traits.arguments_as_text
    assert made.render(called({"a": 1})).text.endswith('<{"a": 1}>')


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "role 'robot'"),
        ({"content": "x"}, "role None"),
        ("text", "role None"),
        ({"role": "user"}, "no content"),
        ({"role": "user", "content": 5}, "neither text nor"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "'text'"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "user message with tool calls"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "without a function name"),
        ({"role": "assistant", "content": "x", "tool_calls": "x"}, "not a list"),
        ({"role": "assistant", "content": "x", "reasoning_content": 5}, "reasoning_content"),
    ],
)
def test_malformed_messages_are_refused_by_place(message: Any, words: str) -> None:
    with pytest.raises(MessageError, match=words) as caught:
        template().render([USER, message])
    assert caught.value.index == 1


def test_no_messages_are_refused() -> None:
    with pytest.raises(MessageError, match="no messages"):
        template().render([])


def test_halves_of_an_emoji_become_one_or_are_marked_wherever_they_stand() -> None:
    pair, half = "\ud83d\udc4d", "\ud83d!"
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": half})}}
    tool = {"type": "function", "function": {"name": "f", "description": half, "parameters": {}}}
    messages = [USER, {"role": "assistant", "content": pair, "tool_calls": [call]}, {"role": "tool", "content": half}]
    prompt = template().render(messages, tools=[tool])
    assert "\N{THUMBS UP SIGN}" in prompt.text
    assert prompt.text.count("\ufffd!") == 3
    assert template().history(messages, tools=[tool])


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "input_text", "text": "i"}]
    assert template().render([{"role": "user", "content": parts}]).text == template().render([USER]).text


def test_what_the_template_raises_is_said() -> None:
    with pytest.raises(MessageError, match="refuses this conversation: no tools here"):
        ChatTemplate(tokenizer("{{ raise_exception('no tools here') }}")).render([USER])


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(NoChatTemplate, match="no chat template"):
        ChatTemplate(tokenizer(""))


# ---- thinking ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opening", "thinking", "opens"),
    [
        ("none", None, False),
        ("none", True, False),
        ("none", False, False),
        ("always", None, True),
        ("always", True, True),
        ("always", False, False),
        ("switch", None, True),
        ("switch", True, True),
        ("switch", False, False),
    ],
)
def test_whether_a_reply_begins_in_a_thought(opening: str, thinking: bool | None, opens: bool) -> None:
    prompt = template(opening).render([USER], thinking=thinking)
    assert prompt.opens_thinking is opens
    assert prompt.text.rstrip().endswith("<think>") is opens


def test_a_template_that_always_thinks_is_given_a_closed_thought() -> None:
    assert template("always").render([USER], thinking=False).text.endswith("<think>\n\n</think>\n\n")


def test_a_user_who_writes_the_tag_opens_no_thought() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for made in (template(), ChatTemplate(tokenizer(plain))):
        assert not made.render([{"role": "user", "content": "say <think>"}]).opens_thinking


def test_thoughts_of_earlier_turns_are_left_to_the_template() -> None:
    thought = {**ANSWER, "reasoning_content": "hmmm"}
    assert "hmmm" not in template("switch").render([USER, thought, USER]).text
    assert "hmmm" in template("switch").render([USER, thought]).text


def test_template_options_are_passed_on() -> None:
    assert ChatTemplate(tokenizer("{{ mood }}")).render([USER], options={"mood": "glad"}).text == "glad"


# ---- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", ["none", "switch"])
def test_the_last_checkpoint_is_where_the_next_turn_goes_on(opening: str) -> None:
    made = template(opening)
    first = made.render([USER])
    second = made.render([USER, ANSWER, USER])
    offset = first.checkpoints[-1]
    assert first.ids[:offset] == second.ids[:offset]
    rest = tokenizer().decode(first.ids[offset:])
    assert rest == ("" if opening == "none" else "<think>\n"), "the header of the reply comes again, the tag may not"


def test_between_tool_calls_the_next_result_and_the_next_question_have_a_mark_each() -> None:
    made = template("switch")
    _, call = called({"n": 1})
    call["reasoning_content"] = "hm"
    turn = [USER, call, {"role": "tool", "content": "t"}]
    prompt = made.render(turn)
    asked, told = prompt.checkpoints
    later = made.render([*turn, ANSWER, USER]).ids
    assert prompt.ids[:asked] == later[:asked] != prompt.ids[: asked + 1]
    again = made.render([*turn, call, {"role": "tool", "content": "t"}]).ids
    assert prompt.ids[:told] == again[:told]
    assert asked < told


def test_a_template_that_refuses_what_may_come_still_gets_its_mark() -> None:
    """One that takes no answers: the mark is the end of the last message."""
    plain = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    prompt = ChatTemplate(tokenizer(plain)).render([USER])
    assert tokenizer().decode(prompt.ids[: prompt.checkpoints[-1]]) == USER["content"]


def test_a_long_system_prompt_gets_a_checkpoint_that_other_conversations_share() -> None:
    made = template()
    long = system("You are a helpful assistant. " * 20)
    one, two = made.render([long, USER]), made.render([long, {"role": "user", "content": "Other words"}])
    assert one.checkpoints[0] == two.checkpoints[0] >= MIN_SHARED_TOKENS
    assert one.ids[: one.checkpoints[0]] == two.ids[: one.checkpoints[0]]
    assert len(made.render([system("Short."), USER]).checkpoints) == 1


def test_tools_count_as_part_of_the_system_prompt() -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "description": "word " * 60}}]  # type: ignore[dict-item]
    assert len(template().render([USER], tools=tools).checkpoints) == 2


@pytest.mark.parametrize("opening", ["none", "switch"])
def test_the_history_is_what_every_next_prompt_begins_with(opening: str) -> None:
    made = template(opening)
    turn = [USER, {**ANSWER, "reasoning_content": "hm"}]
    ids = made.history(turn)
    for words in ("Hi", "ol", "\n\nwell", " day", "."):
        prompt = made.render([*turn, {"role": "user", "content": words}])
        assert prompt.ids[: len(ids)] == ids
        assert tokenizer().decode(prompt.ids[len(ids) :]).startswith(words)


def test_a_place_in_the_text_is_found_where_the_tokenizer_joins_across_it() -> None:
    made, words = template(), tokenizer()
    text = "Hello world Hello world"
    ids = words.encode(text, add_special_tokens=False)
    for at in range(len(text) + 1):
        assert len(words.decode(ids[: made._offset(text, ids, at)])) <= at, "never beyond it"
    for n in range(len(ids) + 1):
        assert made._offset(text, ids, len(words.decode(ids[:n]))) == n, "exactly there between two tokens"
