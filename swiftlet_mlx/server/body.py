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


class Bodies:
    """Reads request bodies, and knows how many bytes of all of them are held."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held = 0

    async def read(self, request: Request) -> dict[str, Any]:
        """Read a body.

        Raises:
            ApiError: 400 it is not a JSON object, 408 it takes too long, 413 it is too large, 503 there are too many.
            ClientDisconnect: the client left before its end.
        """
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                await self._collect(request, parts)
            return parse_object(b"".join(parts))
        except TimeoutError:
            raise _closing(408, "The request body took too long.", "body_timeout") from None
        finally:
            self._held -= sum(map(len, parts))

    async def _collect(self, request: Request, parts: list[bytes]) -> None:
        limit, size = self._settings.max_body_bytes, 0
        too_large = _closing(413, f"The request body is larger than {limit} bytes.", "request_too_large")
        stated = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > limit * DISCARDED:
            raise too_large
        async for part in request.stream():
            size += len(part)
            if size > limit * DISCARDED:
                break
            if size <= limit:
                parts.append(part)
                self._held += len(part)
                if self._held > self._settings.max_bodies_bytes:
                    raise _closing(503, "Too many large requests at once. Try again.", "too_many_bodies")
        if size > limit:
            raise too_large


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


def _closing(status: int, message: str, code: str) -> ApiError:
    """An error after which the connection is closed, since the rest of the body would follow."""
    return ApiError(status, message, code=code, headers={"Connection": "close"})


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value
