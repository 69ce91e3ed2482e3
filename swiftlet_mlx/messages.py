"""Messages in OpenAI's form, checked and brought into one shape.

Knows no template and no tokenizer. Invariant: what `checked_messages` returns has a known role, text content,
and tool-call arguments that are objects; everything else is refused with the message's place in the list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import MessageError

Message = Mapping[str, Any]
"""role, content (text, None, or a list of text parts), and where they apply reasoning_content, tool_calls,
tool_call_id, name."""

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of messages in one form: text content, tool-call arguments as objects.

    Raises:
        MessageError: one is not well-formed; `index` says which.
    """
    if not messages:
        raise MessageError("There are no messages; give at least one.")
    return [_checked(message, i) for i, message in enumerate(messages)]


def encodable(text: str) -> str:
    """The same text in valid Unicode. JSON may bring a pair of surrogates as two characters, which are joined, or half
    of one (a client has cut an emoji in two), which becomes U+FFFD; no tokenizer takes either."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _checked(message: Message, index: int) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        raise MessageError(f"Message {index} has role {role!r}; it must be one of {', '.join(ROLES)}.", index=index)
    out: dict[str, Any] = {"role": role, "content": _content(message, index)}
    for key in ("reasoning_content", "name", "tool_call_id"):
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise MessageError(f"Message {index} has a {key} that is not text.", index=index)
            out[key] = value
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant":
            raise MessageError(f"Message {index} is a {role} message with tool calls.", index=index)
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise MessageError(f"Message {index} has tool_calls that are not a list.", index=index)
        out["tool_calls"] = [_checked_call(call, index) for call in calls]
    return out


def _content(message: Message, index: int) -> str:
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant":
            return ""
        raise MessageError(f"Message {index} ({message['role']}) has no content.", index=index)
    if isinstance(content, str):
        return encodable(content)
    if not isinstance(content, Sequence):
        raise MessageError(f"Message {index} has content that is neither text nor a list of parts.", index=index)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise MessageError(f"Message {index} has a part of type {kind!r}; this model reads text only.", index=index)
        texts.append(text)
    return encodable("".join(texts))


def _checked_call(call: Any, index: int) -> dict[str, Any]:
    """A call whose arguments are an object, whichever form the client sent."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise MessageError(f"Message {index} has a tool call without a function name.", index=index)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise MessageError(
                f"Message {index} calls {name} with arguments that are not JSON: {error}", index=index
            ) from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise MessageError(f"Message {index} calls {name} with arguments that are not a JSON object.", index=index)
    out: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    return out
