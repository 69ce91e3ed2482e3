"""Messages through the official Anthropic client: whole and streamed answers, tools, thoughts, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from serving import Served, scripted, serving
from talkers import chat_template

if TYPE_CHECKING:  # imported where it is used: that takes seconds and every worker collects this file
    import anthropic

HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 7}}\n</tool_call>'


def client_of(served: Served) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serving(scripted("Hello world"), max_messages=50) as served:
        yield served


@pytest.fixture(scope="module")
def client(plain: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(plain) as made:
        yield made


def post(served: Served, **body: Any) -> Any:
    return served.post("/v1/messages", {"max_tokens": 50, "messages": HI, **body})


def test_the_official_client_gets_an_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="tiny", max_tokens=50, messages=HI, system="Be brief.")
    assert [(b.type, b.text) for b in message.content if b.type == "text"] == [("text", "Hello world")]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def test_the_official_client_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="tiny", max_tokens=50, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello world"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0


def test_events_come_in_the_order_of_the_protocol(plain: Served) -> None:
    text = post(plain, stream=True).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    bodies = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [b["type"] for b in bodies] == names
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}


def test_the_budget_and_stop_sequences_are_named(client: anthropic.Anthropic) -> None:
    assert client.messages.create(model="tiny", max_tokens=1, messages=HI).stop_reason == "max_tokens"
    stopped = client.messages.create(model="tiny", max_tokens=50, messages=HI, stop_sequences=["zz", "lo wo"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "lo wo")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "Hel"


def both(client: anthropic.Anthropic, options: Any) -> list[anthropic.types.Message]:
    """The same request streamed and whole."""
    with client.messages.stream(**options) as events:
        streamed: Any = events.get_final_message()
    return [streamed, client.messages.create(**options)]


def test_tool_use_and_its_result() -> None:
    with serving(scripted("Let me see.\n" + CALL + CALL)) as served, client_of(served) as client:
        options: Any = {"model": "tiny", "max_tokens": 99, "messages": HI, "tools": [TOOL]}
        for message in both(client, options):
            assert [b.type for b in message.content] == ["text", "tool_use", "tool_use"]
            use: Any = message.content[1]
            assert (use.name, use.input) == ("f", {"n": 7})
            assert message.stop_reason == "tool_use"
            # What came can be sent back as history.
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "42"}]},
                {"type": "tool_result", "tool_use_id": use.id, "content": "43", "is_error": True},
                {"type": "text", "text": "Well?"},
            ]
            history = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
            assert client.messages.create(**{**options, "messages": history}).stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_one_tool_at_a_time(stream: bool) -> None:
    with serving(scripted(CALL + CALL)) as served, client_of(served) as client:
        options: Any = {
            "model": "tiny", "max_tokens": 99, "messages": HI, "tools": [TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        }  # fmt: skip
        if stream:
            with client.messages.stream(**options) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**options)
        assert [b.type for b in message.content] == ["tool_use"]
        assert message.stop_reason == "tool_use"


def test_a_tool_can_be_forced() -> None:
    with serving(scripted('{"n": 7}}\n</tool_call>')) as served, client_of(served) as client:
        message = client.messages.create(
            model="tiny", max_tokens=99, messages=HI, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}
        )
        assert [b.type for b in message.content] == ["tool_use"]


def test_thoughts_are_a_block_when_asked_for() -> None:
    template = chat_template("switch")
    with serving(scripted("hard</think>\n\nAnswer", template=template)) as served, client_of(served) as client:
        options: Any = {"model": "tiny", "max_tokens": 2000, "messages": HI}
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        for message in both(client, options):
            assert [b.type for b in message.content] == ["thinking", "text"]
            assert message.content[0].thinking == "hard"  # type: ignore[union-attr]
            history = [*HI, {"role": "assistant", "content": message.content}, *HI]
            assert client.messages.create(**{**options, "messages": history}).content[1].type == "text"
    with serving(scripted("Answer", template=template)) as served, client_of(served) as client:
        message = client.messages.create(model="tiny", max_tokens=50, messages=HI)
        assert [b.type for b in message.content] == ["text"]


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HI, system="Be brief.")
    usage = client.messages.create(model="tiny", max_tokens=1, messages=HI, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_official_client_lists_models(client: anthropic.Anthropic) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").display_name == "tiny"


def test_the_official_client_sees_typed_errors(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-opus", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(model="tiny", max_tokens=0, messages=HI)
    body: Any = raised.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
        {"metadata": {"user_id": "x"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5},
        {"thinking": {"type": "disabled"}},
        {"context_management": {"edits": []}},
        {"output_config": {"effort": "high"}},
        {"messages": [*HI, {"role": "system", "content": "now"}, *HI]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}]},
        {"model": "default"},
    ],
)
def test_a_field_is_honoured_or_asks_for_nothing(plain: Served, fields: dict[str, Any]) -> None:
    response = post(plain, **fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, None),
        ({"tool_choice": {"type": "any"}}, None),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, None),
        ({"stop_sequences": [""]}, None),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"messages": HI * 51}, "messages"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(plain: Served, fields: dict[str, Any], param: str | None) -> None:
    response = post(plain, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["param"]) == ("error", param)
    assert post(plain).status_code == 200


def test_a_reply_that_fails_ends_its_stream_with_an_error() -> None:
    failures = [RuntimeError("boom")]

    def step(i: int) -> None:
        if i == 1 and failures:
            raise failures.pop()

    with serving(scripted("Hello world and more", on_step=step)) as served:
        text = post(served, stream=True).text
        assert text.count("event: error") == 1
        assert "message_stop" not in text
        assert post(served).json()["content"][0]["text"] == "Hello world and more"
