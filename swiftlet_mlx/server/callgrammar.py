"""What may stand between the tags of a tool call, as a Lark grammar: one for each format that Qwen models use.

Knows formats and JSON schemas; no tokens. Invariant: a strict tool's call that the grammar lets through parses into
arguments that its schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .failures import unsupported

Schema = Mapping[str, Any]

# A weak model left free to indent would do nothing else until its budget is used up. Keywords that cannot be enforced
# are errors.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\t]{0,40}", "lenient": False}

ANY_OBJECT: Schema = {"type": "object"}
# What a string's schema may say when its value is written bare, between lines of markup.
BARE_STRING = {"type", "description", "title", "default", "examples"}


def calls_grammar(parser: str, tools: Sequence[Mapping[str, Any]], strict: Sequence[bool]) -> str | None:
    """The grammar of a call.

    Args:
        parser: the module of mlx-lm that reads the model's calls.
        tools: in OpenAI's form.
        strict: which of them must have arguments of their schema; of the others any will do.

    Returns:
        Lark, or None if the format is not known.

    Raises:
        ApiError: a strict schema cannot be written in the model's format.
    """
    rules = {"json_tools": _json_call, "qwen3_coder": _xml_call}.get(parser.rpartition(".")[2])
    if rules is None:
        return None
    lines = ["%llguidance {}", "start: " + " | ".join(f"call{i}" for i in range(len(tools)))]
    for i, (tool, is_strict) in enumerate(zip(tools, strict, strict=True)):
        function = tool["function"]
        lines += rules(i, function["name"], function["parameters"] if is_strict else None)
    return "\n".join(lines) + "\n"


def _json_call(i: int, name: str, schema: Schema | None) -> list[str]:
    opening = f'\n{{"name": {_text(name)}, "arguments": '
    return [
        f"call{i}: {_text(opening)} arguments{i} {_text('}' + chr(10))}",
        f"arguments{i}: %json {_dumps(ANY_OBJECT if schema is None else schema)}",
    ]


def _xml_call(i: int, name: str, schema: Schema | None) -> list[str]:
    """Parameters each on lines of their own: strings bare, anything else as JSON."""
    begin, end = _text(f"\n<function={name}>\n"), _text("</function>\n")
    if schema is None:
        return [
            f"call{i}: {begin} parameter{i}* {end}",
            f'parameter{i}: "<parameter=" /[^<>\\s]+/ ">\\n" value{i}',
            f"value{i}[suffix={_text(chr(10) + '</parameter>' + chr(10))}]: /(.|\\n)*/",
        ]
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    unknown = set(schema) - {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    unknown -= {"description", "title", "$schema"}
    if unknown or not required <= set(properties):
        raise unsupported("strict", f": {name} has a schema that cannot be held to: {', '.join(sorted(unknown))}")
    definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    order, rules = [], []
    for n, (key, value) in enumerate(properties.items()):
        order.append(f"p{i}_{n}" + ("" if key in required else "?"))
        rules += _xml_parameter(f"{i}_{n}", name, key, value, definitions)
    return [f"call{i}: {' '.join([begin, *order, end])}", *rules]


def _xml_parameter(i: str, name: str, key: str, schema: Any, definitions: Schema) -> list[str]:
    opening, closing = _text(f"<parameter={key}>\n"), "\n</parameter>\n"
    if not isinstance(schema, Mapping):
        raise unsupported("strict", f": parameter {key} of {name} has no schema")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        choices = " | ".join(_text(v if isinstance(v, str) else json.dumps(v)) for v in values)
        return [f"p{i}: {opening} ({choices}) {_text(closing)}"]
    if schema.get("type") == "string":
        if set(schema) - BARE_STRING:
            kept = ", ".join(sorted(set(schema) - BARE_STRING))
            raise unsupported("strict", f": parameter {key} of {name} is a string with {kept}")
        return [f"p{i}: {opening} v{i}", f"v{i}[suffix={_text(closing)}]: /(.|\\n)*/"]
    return [f"p{i}: {opening} j{i} {_text(closing)}", f"j{i}: %json {_dumps({**schema, **definitions})}"]


def _text(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def _dumps(schema: Schema) -> str:
    return json.dumps({**schema, "x-guidance": JSON_OPTIONS})  # whatever a client says there
