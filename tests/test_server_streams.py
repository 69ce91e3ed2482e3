"""However a streamed reply ends and whatever is asked of the stream, it ends as OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

import pytest
from serving import joined, scripted, serving
from talkers import tokenizer

TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ENDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # what the model says, what is asked, what arrives as text, and the reason
    "end token": ("Hello world", {}, "Hello world", "stop"),
    "budget": (
        "Hello world",
        {"max_tokens": 2},
        str(tokenizer().decode(tokenizer().encode("Hello world")[:2])),
        "length",
    ),
    "stop string": ("Hello world", {"stop": "lo w"}, "Hel", "stop"),
    "tool call": (CALL, {"tools": [TOOL]}, "", "tool_calls"),
}
ABSENT: Any = object()
OPTIONS = [ABSENT, {}, None, {"include_usage": False}, {"include_usage": None}, {"include_usage": True}]


@pytest.mark.parametrize("end", sorted(ENDS))
def test_a_stream_has_one_reason_usage_only_if_asked_for_and_its_last_line(end: str) -> None:
    said, asked, text, reason = ENDS[end]
    with serving(scripted(said)) as served:
        for options in OPTIONS:
            chunks = served.stream(**asked, **({} if options is ABSENT else {"stream_options": options}))
            assert chunks.pop() == "[DONE]"
            assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
            if options is not ABSENT and options and options.get("include_usage"):
                last = chunks.pop()
                assert last["choices"] == []
                assert last["usage"]["completion_tokens"] > 0
                assert all(c["usage"] is None for c in chunks)
            else:
                assert all("usage" not in c for c in chunks)
            reasons = [c["choices"][0]["finish_reason"] for c in chunks]
            assert [r for r in reasons if r is not None] == [reason] == reasons[-1:]
            assert joined(chunks) == text
            calls = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
            assert bool(calls) == (end == "tool call")
