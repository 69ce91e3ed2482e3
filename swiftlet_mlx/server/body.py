"""A request's body as a JSON object, however it arrives: bounded in bytes, time, depth and digits.

Knows HTTP bodies and JSON; nothing of what the fields mean. Invariant: every string in a returned body can be
encoded as UTF-8, and every number is finite.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from starlette.requests import Request

from .failures import ApiError
from .settings import Settings

# A client that still sends when the connection is closed may never see the answer, so a body that is too large is
# taken in and dropped up to this many times the limit.
DISCARDED = 4


async def read_object(request: Request, settings: Settings) -> dict[str, Any]:
    """Read a body.

    Raises:
        ApiError: 400 it is not a JSON object, 408 it takes too long, 413 it is too large.
        ClientDisconnect: the client left before its end.
    """
    try:
        async with asyncio.timeout(settings.body_seconds):
            raw = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, "The request body took too long.", code="body_timeout", headers={"Connection": "close"}
        ) from None
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object from bytes.

    Raises:
        ApiError: it is not one.
    """
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:  # an escaped half of a surrogate pair cannot be encoded again
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.", code="invalid_json") from None
    except UnicodeError:
        raise ApiError(400, "The request body has text that is not UTF-8.", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"The request body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_json")
    return value


async def _read(request: Request, limit: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > limit * DISCARDED:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit * DISCARDED:
            break
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes.",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value
