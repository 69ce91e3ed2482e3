"""Tool calls have a name and an object of arguments, of the types their schema asks for, or they are not calls."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.tool_parsers import json_tools, qwen3_coder

from swiftlet_mlx.toolcalls import parse_calls


def tool(**properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}


def json_call(text: str) -> list[tuple[str, dict[str, Any]]]:
    return parse_calls(text, json_tools.parse_tool_call, [tool()])


def xml_call(text: str, **properties: Any) -> list[tuple[str, dict[str, Any]]]:
    return parse_calls(text, qwen3_coder.parse_tool_call, [tool(**properties)])


def xml(**parameters: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"\n<function=f>\n{body}</function>\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
    ],
)
def test_json_calls_in_any_form_give_one_object(text: str, arguments: dict[str, Any]) -> None:
    assert json_call(text) == [("f", arguments)]


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"arguments": {}}', '{"name": 5}', '{"name": ""}', '{"name": "f", "arguments": [1]}', "[]", "7", "null",
     '{"name": "f", "arguments": "[1]"}'],
)  # fmt: skip
def test_malformed_json_is_not_a_call(text: str) -> None:
    with pytest.raises(ValueError, match="not a tool call"):
        json_call(text)


@pytest.mark.parametrize("text", ["", "<function=>x</function>", "<function=f", "hello", "<function=f><parameter=a>"])
def test_malformed_xml_is_not_a_call(text: str) -> None:
    with pytest.raises(ValueError, match="not a tool call"):
        xml_call(text)


def test_every_function_of_a_block_is_a_call() -> None:
    assert xml_call(xml(a="1") + xml(b="2")) == [("f", {"a": "1"}), ("f", {"b": "2"})]


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "number"}, "2", 2),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": [true]}', {"a": [True]}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[7]", [7]),
        ({"enum": [1, 2]}, "2", 2),
        ({}, "null", "null"),
        ({}, "5", "5"),
    ],
)
def test_xml_values_have_the_type_their_schema_asks_for(schema: dict[str, Any], raw: str, value: Any) -> None:
    [(_, arguments)] = xml_call(xml(a=raw), a=schema)
    assert arguments == {"a": value}
    assert type(arguments["a"]) is type(value)


def test_values_of_many_lines_and_angle_brackets_are_kept() -> None:
    code = "if a < b:\n    print('<x>')\n"
    assert xml_call(xml(code=code), code={"type": "string"}) == [("f", {"code": code})]


def test_a_tool_that_was_not_offered_keeps_its_values_as_text() -> None:
    assert parse_calls(xml(a="1"), qwen3_coder.parse_tool_call, []) == [("f", {"a": "1"})]


def test_a_parser_that_raises_anything_means_no_call() -> None:
    def bad(_text: str, _tools: Any) -> Any:
        raise RuntimeError("surprise")

    with pytest.raises(ValueError, match="surprise"):
        parse_calls("x", bad, [])
