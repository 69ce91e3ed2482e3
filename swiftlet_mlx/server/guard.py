"""Who may come in: names, origins, keys; and what every response carries. The outermost layer.

Knows headers; no bodies, no model. Invariants: a web page of another origin gets nothing unless it was allowed,
whatever name it reaches this server by; a key is compared in constant time; no exception leaves this layer.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .deliver import ClientGone, one_line
from .failures import ApiError
from .settings import Settings

OPEN_PATHS = ("/", "/health")  # without a key: the page, which asks for one, and the probe
MAX_HEADER_BYTES = 32 * 1024
METHODS = "GET, POST, OPTIONS"
GONE = 499  # what nginx logs for a client that left; never sent


class Guard:
    """Lets requests in or turns them away, and logs each.

    Args:
        app: what is guarded.
        settings: names, origins and key.
        done: called after each request with its scope, status and seconds.
        say: takes a line about a fault of this server.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        done: Callable[[Scope, int, float], None],
        say: Callable[[str], None],
    ) -> None:
        self._app = app
        self._settings = settings
        self._done = done
        self._say = say
        self._key = _digest(settings.api_key) if settings.api_key is not None else None
        self._hosts = {"localhost", settings.host.lower(), *(h.lower() for h in settings.allow_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        started, status = time.perf_counter(), 0
        extra = {"x-request-id": f"req_{secrets.token_hex(12)}", **self._cors(headers)}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(extra)
            await send(message)

        scope.setdefault("state", {})
        try:
            response = self._refusal(scope, headers)
            if response is not None:
                await response(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except ClientGone:
            status = GONE
        except Exception as error:
            self._say(one_line(error))
            if not status:
                failed = ApiError(500, "Internal error.", code="internal_error")
                await failed.response()(scope, receive, sending)
        finally:
            self._done(scope, status or GONE, time.perf_counter() - started)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """What to answer instead, if this request may not come in (or only asks whether it may)."""
        try:
            _check_size(headers)
            self._check_host(headers)
            self._check_origin(scope, headers)
            if scope["method"] == "OPTIONS":
                return Response(status_code=204, headers={"Allow": METHODS})
            self._check_key(scope, headers)
        except ApiError as error:
            scope["state"]["refused"] = error
            return error.response()
        return None

    def _check_host(self, headers: Headers) -> None:
        """Against DNS rebinding: an address is what it is, a name must be ours."""
        host = headers.get("host")
        if host is None:
            return  # HTTP/1.0; no browser sends that
        name = _hostname(host)
        if name is None or not (name in self._hosts or _is_address(name)):
            raise ApiError(
                403, "This server is not known by that name; start it with --allow-host NAME.", code="host_not_allowed"
            )

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or self._allowed(origin) or origin == f"{scope['scheme']}://{headers.get('host')}":
            return
        raise ApiError(
            403,
            "Pages of that origin may not use this server; start it with --allow-origin URL.",
            code="origin_not_allowed",
        )

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if self._key is None or (scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")):
            return
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        # Digests have one length, so the time of the comparison tells nothing of the key's.
        if not hmac.compare_digest(_digest(given), self._key):
            raise ApiError(
                401,
                "The API key is missing or wrong.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _allowed(self, origin: str) -> bool:
        return bool({"*", origin} & set(self._settings.allow_origins))

    def _cors(self, headers: Headers) -> dict[str, str]:
        origin = headers.get("origin")
        if origin is None or not self._allowed(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-expose-headers": "x-request-id, retry-after",
            "access-control-max-age": "600",
            "vary": "origin",
        }


def _check_size(headers: Headers) -> None:
    # h11 bounds only a header that is not complete yet; one that came in a single read may be larger.
    if sum(len(k) + len(v) for k, v in headers.raw) > MAX_HEADER_BYTES:
        text = f"The request's header is larger than {MAX_HEADER_BYTES} bytes."
        raise ApiError(431, text, code="header_too_large", headers={"Connection": "close"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _hostname(host: str) -> str | None:
    """The name or address in a Host header, without port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
