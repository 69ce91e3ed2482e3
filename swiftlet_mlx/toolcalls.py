"""Tool calls out of a model's text: mlx-lm's parsers, held to what an API client expects.

Knows the parsers' output and JSON schemas; no tokens, no streaming. Invariant: what is returned has a name
and an arguments object; everything else raises ValueError, and the caller shows the text as text.

What the parsers of mlx-lm 0.32.2 leave to be done: `json_tools` accepts a call without arguments and
arguments that are a JSON string; `qwen3_coder` reads only the first function of a block, makes None of the
word null even where a string is asked for, and knows no `anyOf`. Both may raise anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Parser = Callable[..., Any]
"""f(text, tools) -> {"name": ..., "arguments": ...} or a list of them, as in mlx_lm.tool_parsers."""

Tools = Sequence[Mapping[str, Any]]

_FUNCTION = re.compile(r"<function=.*?</function>", re.DOTALL)


def parse_calls(text: str, parser: Parser, tools: Tools) -> list[tuple[str, dict[str, Any]]]:
    """The calls in the text between two tool-call tags.

    Args:
        text: what stood between the tags.
        parser: the model's parser, from mlx-lm's tokenizer wrapper.
        tools: the tools that were offered, in OpenAI's form; their schemas give the types of XML parameters.

    Returns:
        (name, arguments) for each call, at least one.

    Raises:
        ValueError: this is not a well-formed call.
    """
    functions = _FUNCTION.findall(text)
    calls: list[tuple[str, dict[str, Any]]] = []
    try:
        if functions:
            for function in functions:
                # Without tools the parser leaves every value as the text it is.
                for name, arguments in _calls(parser(function, None)):
                    calls.append((name, _typed(arguments, _schema(name, tools))))
        else:
            calls = _calls(parser(text, list(tools)))
    except Exception as error:  # whatever a parser raises on a model's slip
        raise ValueError(f"not a tool call: {error}") from error
    if not calls:
        raise ValueError("not a tool call: empty")
    return calls


def _calls(parsed: Any) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        name, arguments = call["name"], call.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError("a call needs a name and an object of arguments")
        found.append((name, arguments))
    return found


def _schema(name: str, tools: Tools) -> Mapping[str, Any]:
    """The properties of the tool's parameters; empty if it was not offered or says nothing."""
    for tool in tools:
        function = tool.get("function") or tool
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _typed(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    # The parser makes None of "null" in any letter case, whatever was asked for.
    return {name: _value("null" if raw is None else raw, schema.get(name, {})) for name, raw in arguments.items()}


def _value(raw: Any, schema: Any) -> Any:
    """The text of a parameter as the type its schema asks for; the text itself if it does not fit."""
    types = _types(schema)
    if not isinstance(raw, str) or not types - {"string"}:
        return raw
    text = raw.strip()
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text, raw)  # a model's Python habits
    if isinstance(value, str) or not types & _names(value):
        return raw
    return int(value) if isinstance(value, float) and "integer" in types and value.is_integer() else value


def _types(schema: Any) -> set[str]:
    """All JSON types a schema lets through; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    stated = schema.get("type")
    names = {stated} if isinstance(stated, str) else set(stated) if isinstance(stated, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list):
            names = names.union(*(_types(option) for option in options))
    if not names and isinstance(schema.get("enum"), list):
        names = names.union(*(_names(value) for value in schema["enum"]))
    return names


def _names(value: Any) -> set[str]:
    """The JSON types that a value is of."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, int):
        return {"integer", "number"}
    return {"null"} if value is None else {_CONTAINERS[type(value)]}


_CONTAINERS: dict[type, str] = {str: "string", dict: "object", list: "array"}
