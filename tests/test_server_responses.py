"""Responses through the official client: the text and tool subset, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from serving import Served, scripted, serving
from talkers import chat_template

if TYPE_CHECKING:  # imported where it is used: that takes seconds and every worker collects this file
    import openai

TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 7}}\n</tool_call>'


def client_of(served: Served) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serving(scripted("Hello world")) as served:
        yield served


@pytest.fixture(scope="module")
def client(plain: Served) -> Iterator[openai.OpenAI]:
    with client_of(plain) as made:
        yield made


def post(served: Served, **body: Any) -> Any:
    return served.post("/v1/responses", {"input": "Hi", **body})


def test_the_official_client_gets_an_answer(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    assert response.output_text == "Hello world"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@pytest.mark.parametrize("limit", [None, 1])
def test_the_stream_ends_with_the_whole_response(client: openai.OpenAI, limit: int | None) -> None:
    whole = client.responses.create(model="tiny", input="Hi", max_output_tokens=limit)
    events = list(client.responses.create(model="tiny", input="Hi", max_output_tokens=limit, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last: Any = events[-1]
    assert last.type == ("response.completed" if limit is None else "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.status == whole.status
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    if limit:
        assert last.response.incomplete_details.reason == "max_output_tokens"


def test_thoughts_and_calls_are_items_and_can_be_sent_back() -> None:
    reply = "hard</think>\n\nLet me see.\n" + CALL
    with serving(scripted(reply, template=chat_template("always"))) as served, client_of(served) as client:
        options: Any = {"model": "tiny", "tools": [TOOL]}
        question: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
        with client.responses.stream(input=question, **options) as events:
            streamed: Any = events.get_final_response()
        for response in (streamed, client.responses.create(input=question, **options)):
            assert [i.type for i in response.output] == ["reasoning", "message", "function_call"]
            assert response.output[0].content[0].text == "hard"
            call = response.output[2]
            assert (call.name, json.loads(call.arguments)) == ("f", {"n": 7})
            sent_back = [i.model_dump(exclude={"parsed_arguments"}) for i in response.output]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
            again = client.responses.create(input=[*question, *sent_back, result], **options)
            assert again.status == "completed"


def test_a_call_can_be_forced() -> None:
    with serving(scripted('{"n": 7}}\n</tool_call>')) as served, client_of(served) as client:
        response = client.responses.create(
            model="tiny", input="Hi", tools=[TOOL], tool_choice={"type": "function", "name": "f"}
        )
        assert [i.type for i in response.output] == ["function_call"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "metadata": {"a": "b"}, "truncation": "disabled", "include": [], "user": "u"},
        {"temperature": 0, "top_p": 0.5},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tools": [], "tool_choice": "auto"},
        {"input": [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": "u"}]},
        {"input": [{"type": "reasoning", "id": "r", "summary": []}, {"role": "user", "content": "u"}]},
    ],
)
def test_a_field_is_honoured_or_asks_for_nothing(plain: Served, fields: dict[str, Any]) -> None:
    response = post(plain, **fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(plain: Served, fields: dict[str, Any], param: str | None) -> None:
    response = post(plain, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert post(plain).status_code == 200


def test_a_reply_that_fails_ends_its_stream_with_an_error() -> None:
    failures = [RuntimeError("boom")]

    def step(i: int) -> None:
        if i == 1 and failures:
            raise failures.pop()

    with serving(scripted("Hello world and more", on_step=step)) as served, client_of(served) as client:
        events = list(client.responses.create(model="tiny", input="Hi", stream=True))
        assert events[-1].type == "response.failed"
        assert client.responses.create(model="tiny", input="Hi").output_text == "Hello world and more"
