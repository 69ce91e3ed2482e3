"""Chat Completions through the official client and as raw JSON: every field is honoured or refused by name."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from serving import CLIENT, USER, Served, joined, scripted, serving
from talkers import chat_template

if TYPE_CHECKING:  # imported where it is used: that takes seconds and every worker collects this file
    import openai

XML_CALL = "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 7}}\n</tool_call>'
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    """Says `Hello world` to everything."""
    with serving(scripted("Hello world"), aliases=("gpt-4o-mini",)) as served:
        yield served


@pytest.fixture(scope="module")
def client(plain: Served) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=plain.url + "/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def error_of(response: Any) -> dict[str, Any]:
    """The error object of a refused request."""
    assert response.status_code >= 400, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- answers -----------------------------------------------------------------------------------------------------


def test_the_official_client_gets_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id is not None


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert len({c.id for c in chunks}) == 1


def test_the_asynchronous_client_streams(plain: Served) -> None:
    import asyncio

    import openai

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=plain.url + "/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == "Hello world"


@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": None}])
def test_usage_is_streamed_only_when_asked_for(plain: Served, options: dict[str, Any]) -> None:
    chunks = plain.stream(**options)
    assert chunks[-1] == "[DONE]"
    assert all("usage" not in c and c["object"] == "chat.completion.chunk" and c["choices"] for c in chunks[:-1])


def test_whole_and_streamed_answers_carry_the_same(plain: Served) -> None:
    whole = plain.chat(max_tokens=1).json()
    chunks = plain.stream(max_tokens=1, stream_options={"include_usage": True})
    assert joined(chunks) == whole["choices"][0]["message"]["content"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-2]]
    assert [r for r in reasons if r] == [whole["choices"][0]["finish_reason"]] == ["length"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-2]["usage"][n] for n in counts] == [whole["usage"][n] for n in counts]


def test_a_repeated_prompt_tells_what_was_cached(plain: Served) -> None:
    question = [{"role": "user", "content": "a question of its own, long enough to be worth it"}]
    first = plain.chat(messages=question).json()["usage"]
    second = plain.chat(messages=question).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < first["prompt_tokens"] - 5
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


def test_thoughts_come_under_both_names() -> None:
    reply = "thinking hard</think>\n\nAnswer"
    with serving(scripted(reply, template=chat_template("always"))) as served:
        chunks = served.stream()
        streamed = {name: joined(chunks, name) for name in ("reasoning", "reasoning_content", "content")}
        for got in (streamed, served.chat().json()["choices"][0]["message"]):
            assert got["reasoning"] == got["reasoning_content"] == "thinking hard"
            assert got["content"] == "Answer"


def test_a_thought_cut_by_the_budget_leaves_the_content_empty() -> None:
    with serving(scripted("thinking hard and long</think>\n\nAnswer", template=chat_template("always"))) as served:
        choice = served.chat(max_tokens=3).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == ""
        assert choice["message"]["reasoning"]


def test_thinking_can_be_switched() -> None:
    fields: list[tuple[dict[str, Any], bool]] = [
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({}, True),
    ]
    with serving(scripted("a</think>\n\nb", template=chat_template("switch"))) as served:
        for field, opens in fields:
            message = served.chat(**field).json()["choices"][0]["message"]
            assert message.get("reasoning") == ("a" if opens else None), field


def test_several_choices_are_served() -> None:
    with serving(scripted("one", "two", "three")) as served:
        body = served.chat(n=3).json()
        assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [
            (0, "one"),
            (1, "two"),
            (2, "three"),
        ]
        assert body["usage"]["completion_tokens"] > 3
        chunks = served.stream(n=2, seed=1)
        assert {c["choices"][0]["index"] for c in chunks[:-1]} == {0, 1}
        assert sum(c["choices"][0]["finish_reason"] == "stop" for c in chunks[:-1]) == 2


def test_logprobs_have_their_shape(plain: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(p.token for p in logprobs.content) == "Hello world"
    for p in logprobs.content:
        assert p.bytes == list(p.token.encode())
        assert -0.1 < p.logprob <= 0
        assert len(p.top_logprobs) == 2
        assert p.top_logprobs[0].token == p.token
    chunks = plain.stream(logprobs=True)
    tokens = [p["token"] for c in chunks[:-1] for p in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(tokens) == "Hello world"


# ---- stops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["lo wo", ["nothing", "lo wo", "x", "y"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_before_it(plain: Served, stop: Any, stream: bool) -> None:
    if stream:
        chunks = plain.stream(stop=stop)
        content, reason = joined(chunks), chunks[-2]["choices"][0]["finish_reason"]
    else:
        choice = plain.chat(stop=stop).json()["choices"][0]
        content, reason = choice["message"]["content"], choice["finish_reason"]
    assert (content, reason) == ("Hel", "stop")


@pytest.mark.parametrize("stop", [[1], 5, "", [""], ["a"] * 17, {"a": 1}, [None]])
def test_a_stop_that_is_none_is_refused_and_the_next_request_served(plain: Served, stop: Any) -> None:
    assert plain.chat(stop=stop).status_code == 400
    assert plain.chat().json()["choices"][0]["message"]["content"] == "Hello world"


# ---- tools -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("xml", [False, True])
def test_tool_calls_arrive_whole_and_streamed(xml: bool) -> None:
    import openai

    call = XML_CALL if xml else JSON_CALL
    options: Any = {"model": "tiny", "messages": USER, "tools": [TOOL]}
    with (
        serving(scripted("Let me see.\n" + call + "\n" + call, xml=xml)) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none") as client,
    ):
        with client.chat.completions.stream(**options) as events:
            streamed = events.get_final_completion().choices[0]
        for choice in (streamed, client.chat.completions.create(**options).choices[0]):
            calls: list[Any] = choice.message.tool_calls or []
            assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [("f", {"n": 7})] * 2
            assert len({c.id for c in calls}) == 2
            assert choice.message.content == "Let me see."
            assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time_ends_after_the_first(stream: bool) -> None:
    body: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False}
    with serving(scripted(JSON_CALL + "\n" + JSON_CALL + " and more text that nobody asked for")) as served:
        if stream:
            deltas = [c["choices"][0] for c in served.stream(**body)[:-1]]
            assert {d["index"] for c in deltas for d in c["delta"].get("tool_calls", [])} == {0}
            assert deltas[-1]["finish_reason"] == "tool_calls"
            return
        choice = served.chat(**body).json()["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("broken", ['<tool_call>\n{"name": "f", "arg', "<tool_call>\nnothing\n</tool_call>"])
def test_a_broken_call_is_text(broken: str) -> None:
    with serving(scripted(broken)) as served:
        chunks = served.stream(tools=[TOOL])
        assert all("tool_calls" not in c["choices"][0]["delta"] for c in chunks[:-1])
        assert joined(chunks) == broken
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        choice = served.chat(tools=[TOOL]).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == broken
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("xml", [False, True])
def test_a_call_can_be_forced(xml: bool) -> None:
    rest = "\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>" if xml else '{"n": 7}}\n</tool_call>'
    opening = "f>" if xml else 'f", "arguments": '
    other = {"type": "function", "function": {"name": "other"}}
    template = chat_template("always", xml=xml)
    with serving(scripted(rest.lstrip(), opening + rest, template=template, xml=xml)) as served:
        named = {"type": "function", "function": {"name": "f"}}
        for choice in (named, "required"):
            got = served.chat(tools=[TOOL, other], tool_choice=choice).json()["choices"][0]
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in got["message"].get("tool_calls", [])]
            assert calls == [("f", '{"n": 7}')], got
            assert got["finish_reason"] == "tool_calls"


def test_tools_that_may_not_be_called_are_not_offered() -> None:
    with serving(scripted(JSON_CALL)) as served:
        choice = served.chat(tools=[TOOL], tool_choice="none").json()["choices"][0]
        assert choice["message"]["content"] == JSON_CALL
        with_tools = served.post("/tokenize", {"messages": USER, "tools": [TOOL]}).json()["count"]
        assert served.chat(tools=[TOOL], tool_choice="none").json()["usage"]["prompt_tokens"] < with_tools


@pytest.mark.parametrize(
    ("choice", "tools"),
    [("required", []), ({"type": "function", "function": {"name": "g"}}, [TOOL]), ("sometimes", [TOOL]), (1, [TOOL])],
)
def test_an_impossible_tool_choice_is_refused(plain: Served, choice: Any, tools: list[Any]) -> None:
    assert plain.chat(tools=tools, tool_choice=choice).status_code == 400


@pytest.mark.parametrize(
    ("arguments", "good"), [("{}", True), ("", True), (None, True), ({"a": 1}, True), ("[1]", False), ('{"a":', False)]
)
def test_calls_in_the_history_render_in_every_form_clients_send(plain: Served, arguments: Any, good: bool) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "42"}]},
    ]
    response = plain.chat(messages=messages)
    if good:
        assert response.status_code == 200, response.text
    else:
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, "messages[1]")


# ---- messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "roles",
    [
        ["system", "user", "assistant", "system", "user"],
        ["developer", "user"],
        ["system", "system", "user"],
        ["user", "assistant", "user", "developer"],
    ],
)
def test_system_and_developer_messages_may_stand_anywhere(plain: Served, roles: list[str]) -> None:
    messages = [{"role": r, "content": f"text {i}"} for i, r in enumerate(roles)]
    assert plain.chat(messages=messages).status_code == 200
    assert plain.post("/tokenize", {"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}], "messages[1].role"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0]"),
        ([{"role": "user", "content": [{"text": "no type"}]}], "messages[0].content[0].type"),
        (["Hi"], "messages[0]"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_its_place(plain: Served, messages: Any, param: str) -> None:
    response = plain.chat(messages=messages)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_parts_are_read_as_text(plain: Served) -> None:
    parts = [{"type": "text", "text": "H", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "i"}]
    one = plain.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json()["tokens"]
    assert one == plain.post("/tokenize", {"messages": USER}).json()["tokens"]


@pytest.mark.parametrize("words", [5000, 60_000])
def test_a_prompt_beyond_the_context_is_refused(plain: Served, words: int) -> None:
    """Far beyond it, before its tokens are counted: that takes a tokenizer seconds."""
    response = plain.chat(messages=[{"role": "user", "content": "word " * words}])
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert ("characters" in error_of(response)["message"]) == (words > 5000)


# ---- fields ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 10**9},
        {"max_completion_tokens": 10**30},
        {"max_completion_tokens": None, "max_tokens": 5},
        {"temperature": None, "top_p": None, "stream": None, "stop": None, "seed": None, "tools": None, "n": None},
        {"temperature": 0},
        {"temperature": 1.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3},
        {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1},
        {"top_k": 10**6},
        {"logit_bias": {"5": -100, "6": 1.5}},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto", "xtc_probability": 0, "functions": None},
        {"chat_template_kwargs": {"anything": 1}},
        {"prompt_cache_key": "k", "safety_identifier": "s"},
        {"model": None},
        {"model": "default"},
        {"model": "gpt-4o-mini"},
    ],
)
def test_a_field_is_honoured_or_asks_for_nothing(plain: Served, fields: dict[str, Any]) -> None:
    response = plain.chat(**fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": 5}, "stream_options"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, None),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, None),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None),
        ({"chat_template_kwargs": {"tokenize": True}}, None),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(plain: Served, fields: dict[str, Any], param: str | None) -> None:
    response = plain.chat(**fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert plain.chat().status_code == 200


@pytest.mark.parametrize("model", ["gpt-4o", "/etc", "../tiny", "mlx-community/Qwen3-4B", "x" * 5000, "tiny.qpack"])
def test_another_model_is_not_found_at_once(plain: Served, model: str) -> None:
    response = plain.chat(model=model)
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"
    assert "--alias" in response.text
    assert len(response.text) < 2000


def test_the_terminal_is_told_why_a_request_was_refused(plain: Served) -> None:
    def last(**body: Any) -> str:
        before = len(plain.said)
        assert plain.chat(**body).status_code in (400, 404)
        while len(plain.said) == before:  # said after the answer is sent
            time.sleep(0.001)
        return plain.said[-1]

    assert re.fullmatch(r"POST /v1/chat/completions 400 [\d.]+ s, unsupported_parameter: foo", last(foo=1))
    assert last(model="gpt-4o").endswith("model_not_found: model")
    assert last(**{"\x1b[31m" + "x" * 500: 1}).endswith(": \\x1b[31m" + "x" * 55), "a client's word moves no cursor"


def test_the_official_client_sees_typed_errors(client: openai.OpenAI) -> None:
    import openai

    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=messages)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=messages, temperature=99)
    assert raised.value.param == "temperature"


def test_the_official_client_lists_models(client: openai.OpenAI) -> None:
    import openai

    assert [m.id for m in client.models.list()] == ["tiny"]
    for name in ("tiny", "gpt-4o-mini", "default"):
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


# ---- the other endpoints -----------------------------------------------------------------------------------------


def test_text_completions_through_the_official_client(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Once", echo=True)
    assert answer.choices[0].text == "OnceHello world"
    many = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=1)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert {c.finish_reason for c in many.choices} == {"length"}
    assert many.usage is not None
    assert many.usage.prompt_tokens == 2
    assert many.usage.completion_tokens == 4
    stream = client.completions.create(model="tiny", prompt=[5, 6, 7], stream=True)
    assert "".join(c.choices[0].text for c in stream) == "Hello world"


def test_text_completions_have_logprobs_of_their_own_shape(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="tiny", prompt="Once", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "Hello world"
    assert (logprobs.text_offset or [])[:2] == [0, len((logprobs.tokens or [""])[0])]
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [])


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [""]},
        {"prompt": None},
        {},
        {"prompt": [1, "a"]},
        {"prompt": [10**9]},
        {"prompt": [-1]},
        {"prompt": [True]},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "best_of": 2},
        {"prompt": "a", "echo": True, "logprobs": 1},
        {"prompt": ["a"] * 65},
        {"prompt": "a", "logit_bias": {"100000": 5}},
    ],
)
def test_a_bad_text_request_is_refused_and_the_next_one_served(plain: Served, body: dict[str, Any]) -> None:
    response = plain.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert error_of(response)["message"]
    assert plain.post("/v1/completions", {"prompt": "a"}).json()["choices"][0]["text"] == "Hello world"


def test_a_prompt_that_is_cached_whole_is_answered(plain: Served) -> None:
    first = plain.post("/v1/completions", {"prompt": "The same prompt", "max_tokens": 3}).json()
    text = first["choices"][0]["text"]
    ids = plain.post("/tokenize", {"prompt": "The same prompt"}).json()["tokens"]
    said = plain.post("/tokenize", {"prompt": text}).json()["tokens"]
    for prompt in (ids, ids + said, ids + said):
        response = plain.post("/v1/completions", {"prompt": prompt, "max_tokens": 3})
        assert response.status_code == 200, response.text
    assert plain.get("/health").status_code == 200


def test_tokenize_counts_as_the_model_reads(plain: Served) -> None:
    body = plain.post("/tokenize", {"prompt": "Hello world"}).json()
    assert body["count"] == len(body["tokens"]) > 0
    assert body["max_model_len"] == 4096
    assert plain.post("/tokenize", {}).status_code == 400
    chat = plain.post("/tokenize", {"messages": USER}).json()
    assert plain.chat().json()["usage"]["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/foo", 404),
        ("POST", "/v1/foo", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/a/b", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/v1/models?x=y", 200),
        ("HEAD", "/health", 200),
    ],
)
def test_paths_and_methods(plain: Served, method: str, path: str, status: int) -> None:
    response = CLIENT.request(method, plain.url + path)
    assert response.status_code == status
    if status >= 400 and method != "HEAD":
        error_of(response)
    if status == 405:
        assert response.headers["allow"]


def test_a_query_is_ignored(plain: Served) -> None:
    assert plain.post("/v1/chat/completions?beta=true", {"messages": USER}).status_code == 200


def test_health_and_metrics_tell_the_truth(plain: Served) -> None:
    health = plain.get("/health").json()
    assert health["status"] == "ready"
    assert health["in_flight"] == 0
    before = plain.get("/metrics").text
    plain.chat()
    after = plain.get("/metrics").text

    def value(text: str, name: str) -> float:
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))

    assert value(after, "swiftlet_generated_tokens_total") > value(before, "swiftlet_generated_tokens_total")
    n = "swiftlet_time_to_first_token_seconds_count"
    assert value(after, n) == value(before, n) + 1
    assert value(after, "swiftlet_resident_bytes") > 1e6
