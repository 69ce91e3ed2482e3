"""Errors as clients see them: one shape for every endpoint, a status and a code for each cause.

Knows the package's errors and pydantic's; no routes. Invariant: a client's mistake is a 4xx that names the
parameter, anything else a 5xx, and no message holds a path of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from swiftlet_mlx.errors import (
    ContextFull,
    EngineBusy,
    EngineClosed,
    EngineFailed,
    MessageError,
    OptionError,
    SamplingError,
    SwiftletError,
)

MAX_TEXT = 1000  # of a message; a client's own input may be quoted in it

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of HTTP.
        message: for a person.
        param: the field that is to blame, as `messages[3].content`.
        code: for a program.
        headers: to be sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_TEXT else message[: MAX_TEXT - 1] + "…"
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, which holds Anthropic's."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    @property
    def body(self) -> dict[str, Any]:
        """The response body: `error` as in OpenAI's API; with `type` beside it, as in Anthropic's."""
        return {"type": "error", "error": self.error}

    def response(self) -> Response:
        return Response(dumps(self.body), self.status, self.headers, media_type="application/json")


def dumps(value: Any) -> bytes:
    """JSON in one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def unsupported(field: str, why: str = "") -> ApiError:
    """A field, or a value of one, that would not be honoured."""
    return ApiError(400, f"unsupported: {field}{why}", param=field, code="unsupported_parameter")


def from_validation(error: ValidationError, body: Any) -> ApiError:
    """The first thing wrong with a body, by its place."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the errors about one field the deepest: a union has one for each form it might have had.
    first = max((e for e in found if e["loc"][:1] == found[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    param = _place(first["loc"], body, missing=first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        return unsupported(param or "body")
    text = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {text}" if param else text, param=param, code="invalid_value")


def _place(loc: tuple[int | str, ...], body: Any, missing: bool) -> str | None:
    """A place as `messages[3].role`. pydantic puts names of union members between; those are not in the body."""
    out, here = "", body
    for i, step in enumerate(loc):
        if isinstance(here, dict) and (step in here or (missing and i == len(loc) - 1)):
            out, here = (f"{out}.{step}" if out else str(step)), here.get(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            out, here = f"{out}[{step}]", here[step]
    return out or None


def from_library(error: SwiftletError) -> ApiError:
    """What the library refused, or failed at."""
    text = str(error)
    if isinstance(error, SamplingError):
        return ApiError(400, text, param=error.param, code="invalid_value")
    if isinstance(error, OptionError):
        return ApiError(400, text, code="invalid_value")
    if isinstance(error, MessageError):
        place = "messages" if error.index is None else f"messages[{error.index}]"
        return ApiError(400, text, param=place, code="invalid_message")
    if isinstance(error, ContextFull):
        return ApiError(400, text, param="messages", code="context_length_exceeded")
    if isinstance(error, EngineBusy):
        return ApiError(429, text, code="queue_full", headers={"Retry-After": "5"})
    if isinstance(error, EngineClosed):
        return ApiError(503, "The server is shutting down.", code="shutting_down")
    if isinstance(error, EngineFailed):
        return ApiError(503, "The model could not be loaded; see the server's messages.", code="model_failed")
    # Messages of failed reads and broken models name files: those are for the server's own terminal.
    return ApiError(500, f"Generation failed ({type(error).__name__}).", code="generation_failed")
