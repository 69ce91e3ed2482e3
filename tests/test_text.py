"""Stop strings, thoughts and tool calls come out the same however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlet_mlx.text import Markup, Piece, Splitter, StopMatcher, ends_sentence

QWEN = Markup("<think>", "</think>", "<tool_call>", "</tool_call>")
NO_TOOLS = Markup("<think>", "</think>")


def stopped(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.add(p) for p in pieces)
    return out + matcher.finish(), matcher.matched


def split(pieces: list[str], markup: Markup = QWEN, thinking: bool = False) -> list[Piece]:
    """All pieces, neighbours of one kind joined."""
    splitter = Splitter(markup, thinking)
    found = [p for piece in pieces for p in splitter.add(piece)] + splitter.finish()
    out: list[Piece] = []
    for piece in found:
        if out and piece.kind != "tool_call" and out[-1].kind == piece.kind:
            out[-1] = Piece(piece.kind, out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def kinds(pieces: list[Piece]) -> list[tuple[str, str]]:
    return [(p.kind, p.text) for p in pieces]


# ---- stop strings ----------------------------------------------------------------------------------------------


def test_a_stop_string_across_a_token_border_ends_the_text_before_it() -> None:
    assert stopped([" hello", " world", " and more"], ["lo wo"]) == (" hel", "lo wo")


def test_a_stop_string_inside_one_token_ends_the_text_before_it() -> None:
    assert stopped(["stop"], ["st"]) == ("", "st")
    assert stopped(["a stop b"], ["st"]) == ("a ", "st")


def test_the_beginning_of_a_stop_string_that_never_comes_is_flushed() -> None:
    assert stopped(["abc", "\nUs"], ["\nUser:"]) == ("abc\nUs", None)


def test_the_stop_string_complete_first_wins() -> None:
    assert stopped(["abcdef"], ["cdef", "de"]) == ("abc", "de")
    assert stopped(["x", "y", "z"], ["yz", "xyz", "q", "w"]) == ("", "xyz")


def test_nothing_that_could_become_a_stop_string_is_let_out() -> None:
    matcher = StopMatcher(["END!"])
    assert matcher.add("the EN") == "the "
    assert matcher.add("D") == ""
    assert matcher.add("?") == "END?"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stopping_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert stopped(pieces, stops) == stopped(list(text), stops)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if ends:
        first = min(end for end, _ in ends)
        assert stopped(pieces, stops)[0] == text[: min(at for end, at in ends if end == first)]
    else:
        assert stopped(pieces, stops) == (text, None)


# ---- thoughts --------------------------------------------------------------------------------------------------


def test_a_thought_the_prompt_opened_ends_at_its_tag() -> None:
    assert kinds(split(["thinking hard</think>\n\nAnswer"], thinking=True)) == [
        ("thinking", "thinking hard"),
        ("text", "Answer"),
    ]


def test_a_thought_the_reply_opens_is_recognised_at_its_start_only() -> None:
    assert kinds(split(["\n<think>\nhm\n</think>\n\nWrite <think> so."])) == [
        ("thinking", "hm"),
        ("text", "Write <think> so."),
    ]


def test_a_thought_opened_twice_shows_no_tag() -> None:
    assert kinds(split(["<think>\nhm</think>A"], thinking=True)) == [("thinking", "hm"), ("text", "A")]


def test_a_cut_thought_never_becomes_the_answer() -> None:
    assert kinds(split(["thinking ha"], thinking=True)) == [("thinking", "thinking ha")]
    assert kinds(split(["thinking</thi"], thinking=True)) == [("thinking", "thinking</thi")]


def test_tags_are_text_for_a_model_without_thoughts() -> None:
    assert kinds(split(["<think>a</think>b"], Markup())) == [("text", "<think>a</think>b")]


def test_plain_answers_keep_every_character() -> None:
    text = "  \n leading, trailing \n\n"
    assert kinds(split(list(text), NO_TOOLS)) == [("text", text)]


def test_indentation_after_a_thought_is_kept() -> None:
    assert kinds(split(["x</think>\n\n    code"], thinking=True))[-1] == ("text", "    code")


# ---- tool calls ------------------------------------------------------------------------------------------------


def test_calls_come_whole_and_the_text_around_them_without_its_newlines() -> None:
    text = "Let me see.\n<tool_call>\n{1}\n</tool_call>\n<tool_call>\n{2}\n</tool_call>\n"
    assert kinds(split([text])) == [("text", "Let me see."), ("tool_call", "\n{1}\n"), ("tool_call", "\n{2}\n")]


def test_a_cut_call_is_text_with_its_tag() -> None:
    assert kinds(split(['<tool_call>\n{"na'])) == [("text", '<tool_call>\n{"na')]


def test_a_call_inside_a_thought_is_part_of_the_thought() -> None:
    found = kinds(split(["I could <tool_call>x</tool_call></think>no"], thinking=True))
    assert found == [("thinking", "I could <tool_call>x</tool_call>"), ("text", "no")]


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "a", "<", "</", "think>", "tool_call>", "b c"]


@given(st.lists(st.sampled_from(PARTS), max_size=14), st.booleans(), st.data())
def test_splitting_does_not_depend_on_how_the_text_is_cut(
    parts: list[str], thinking: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, thinking=thinking) == split(list(text), thinking=thinking)


@given(st.lists(st.sampled_from(PARTS), max_size=14), st.booleans())
def test_no_character_but_newlines_and_tags_is_lost(parts: list[str], thinking: bool) -> None:
    text = "".join(parts)
    shown = "".join(p.raw or p.text for p in split(list(text), thinking=thinking))
    rest = text.replace("<think>", "", 1).replace("</think>", "", 1)
    strip = str.maketrans("", "", "\n ")
    assert shown.translate(strip) in (
        text.translate(strip),
        rest.translate(strip),
        text.replace("<think>", "", 1).translate(strip),
        text.replace("</think>", "", 1).translate(strip),
    )


@pytest.mark.parametrize("text", ["It is.", 'He said "no."', "Ja!", "本当。", "line\n", "(Really?)", "**Bold.**"])
def test_sentence_ends_are_seen(text: str) -> None:
    assert ends_sentence(text)


@pytest.mark.parametrize("text", ["It is", "e.g. this", "a,", ""])
def test_the_middle_of_a_sentence_is_no_end(text: str) -> None:
    assert not ends_sentence(text)
