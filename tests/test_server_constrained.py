"""Replies held to a schema: whatever a (random) model would say, what comes out is of the asked form."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import USER, Served, joined, scripted, serving
from talkers import chat_template, random_model, tokenizer

from swiftlet_mlx.server.callgrammar import calls_grammar
from swiftlet_mlx.server.failures import ApiError

here = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["n", "ok", "kind"],
    "additionalProperties": False,
}
STRICT: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
OTHER: Any = {"type": "function", "function": {"name": "other"}}


def fits(value: Any) -> bool:
    return (
        set(value) == {"n", "ok", "kind"}
        and type(value["n"]) is int
        and 0 <= value["n"] <= 99
        and type(value["ok"]) is bool
        and value["kind"] in ("red", "green")
    )


def wanted(schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


def rambling(template: str | None = None, xml: bool = False) -> Any:
    return lambda: (random_model(), tokenizer(template, xml=xml))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A model with random weights, which says nothing sensible by itself."""
    with serving(rambling()) as running:
        yield running


@here
@pytest.mark.parametrize(("seed", "stream"), [(0, False), (1, True)])
def test_a_random_model_keeps_to_the_schema(served: Served, seed: int, stream: bool) -> None:
    body = {"response_format": wanted(), "seed": seed, "temperature": 2, "max_tokens": 300}
    if stream:
        chunks = served.stream(**body)
        text, reason = joined(chunks), chunks[-2]["choices"][0]["finish_reason"]
    else:
        choice = served.chat(**body).json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert reason == "stop"
    assert fits(json.loads(text))


@here
def test_a_json_object_is_one(served: Served) -> None:
    # Of any object a random model may go on for ever, so the budget may cut it: then it is the beginning of one.
    choice = served.chat(response_format={"type": "json_object"}, seed=3, temperature=1, max_tokens=400).json()
    choice = choice["choices"][0]
    text = choice["message"]["content"]
    assert text.startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)


@here
def test_logprobs_of_a_held_reply_are_json(served: Served) -> None:
    response = served.chat(response_format=wanted(), logprobs=True, top_logprobs=20, temperature=0, max_tokens=100)
    assert "Infinity" not in response.text
    assert response.json()["choices"][0]["logprobs"]["content"]


@here
def test_thoughts_stay_free_before_a_held_answer() -> None:
    thought = 'hm {"a": <tool_call></think>'
    with serving(scripted(thought + '{"n": 5, "ok": true, "kind": "red"}', template=chat_template("always"))) as served:
        message = served.chat(response_format=wanted()).json()["choices"][0]["message"]
        assert message["reasoning"] == 'hm {"a": <tool_call>'
        assert fits(json.loads(message["content"]))


@here
def test_every_client_library_gets_its_structure(served: Served) -> None:
    import anthropic
    import openai

    with openai.OpenAI(base_url=served.url + "/v1", api_key="none") as client:
        text: Any = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
        response = client.responses.create(model="tiny", input="Hi", text=text, temperature=1, max_output_tokens=300)
        assert fits(json.loads(response.output_text))
    with anthropic.Anthropic(base_url=served.url, api_key="none") as claude:
        config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        message = claude.messages.create(model="tiny", max_tokens=300, messages=USER, output_config=config)  # type: ignore[arg-type]
        assert fits(json.loads(message.content[0].text))  # type: ignore[union-attr]


@here
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"$ref": "file:///etc/passwd"},
        {"type": "string", "pattern": "("},
        {"not": {"type": "string"}},
        {"enum": []},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(served: Served, schema: Any) -> None:
    response = served.chat(response_format=wanted(schema))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_schema"
    assert served.chat(max_tokens=1).status_code == 200


@here
def test_a_format_together_with_tools_is_refused(served: Served) -> None:
    response = served.chat(response_format=wanted(), tools=[OTHER])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


@here
@pytest.mark.parametrize("xml", [False, True])
def test_a_random_model_makes_the_strict_call_it_must(xml: bool) -> None:
    with serving(rambling(chat_template("always", xml=xml), xml)) as served:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            body = {"tools": [STRICT], "tool_choice": choice, "parallel_tool_calls": False}
            got = served.chat(**body, seed=1, temperature=2, max_tokens=400).json()["choices"][0]
            assert got["finish_reason"] == "tool_calls", got
            (call,) = got["message"]["tool_calls"]
            assert call["function"]["name"] == "f"
            assert fits(json.loads(call["function"]["arguments"]))


@here
@pytest.mark.parametrize("xml", [False, True])
def test_a_call_the_model_begins_itself_is_held_too(xml: bool) -> None:
    """The scripted model writes a call of a wrong form; the mask makes it a right one."""
    with serving(scripted("I see.\n<tool_call>nonsense", xml=xml)) as served:
        body = {"tools": [STRICT], "parallel_tool_calls": False, "max_tokens": 600}
        got = served.chat(**body, temperature=5, seed=1).json()["choices"][0]
        assert got["message"]["content"] == "I see."
        assert fits(json.loads(got["message"]["tool_calls"][0]["function"]["arguments"]))


@pytest.mark.parametrize("body", [{"response_format": {"type": "json_object"}}, {"tools": [STRICT]}])
def test_without_the_package_it_is_refused_with_the_way_to_get_it(
    served: Served, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftlet_mlx.server.constrain._installed", lambda: False)
    response = served.chat(**body)
    assert response.status_code == 400
    assert "swiftlet-mlx[json]" in response.json()["error"]["message"]
    assert served.chat(tools=[OTHER], tool_choice="required", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"s": {"type": "string", "pattern": "a+"}}},
        {"type": "object", "properties": {"s": True}},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"anyOf": [{"type": "object"}]},
    ],
)
def test_a_strict_schema_that_the_markup_cannot_carry_is_refused(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError):
        calls_grammar("mlx_lm.tool_parsers.qwen3_coder", [tool], [True])
    assert calls_grammar("mlx_lm.tool_parsers.qwen3_coder", [tool], [False]) is not None
    assert calls_grammar("mlx_lm.tool_parsers.unheard_of", [tool], [True]) is None
