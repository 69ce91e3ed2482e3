"""The application: which path goes where. No logic of its own.

Knows every route; requests become models here, models become wishes or answers elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftlet_mlx.events import Statistics

from .anthropic import count, messages
from .anthropic_protocol import CountRequest, MessagesRequest
from .chat import chat
from .deliver import ClientGone, Wish, deliver
from .desk import Desk
from .failures import ApiError, from_validation
from .guard import GONE, Guard
from .models import Small, json_response
from .openapi import schema
from .protocol import ChatRequest, TextRequest, TokenizeRequest
from .responses import responses
from .responses_protocol import ResponsesRequest
from .strict import Strict
from .text import text

M = TypeVar("M", bound=Strict)


class _Posted(Generic[M]):
    """A POST endpoint: body, model, action."""

    def __init__(self, desk: Desk, model: type[M]) -> None:
        self._desk = desk
        self._model = model

    async def read(self, scope: Scope, receive: Receive) -> M:
        """The checked body.

        Raises:
            ApiError: it is refused.
            ClientGone: the client left before its end.
        """
        try:
            body = await self._desk.bodies.read(Request(scope, receive))
        except ClientDisconnect:
            raise ClientGone from None
        name = body.get("model")
        if isinstance(name, str):
            self._desk.check_model(name)  # first, for the name decides what the other fields may be
        try:
            return self._model.model_validate(body)
        except ValidationError as error:
            raise from_validation(error, body) from None


class _Generating(_Posted[M]):
    """An endpoint that generates."""

    def __init__(self, desk: Desk, model: type[M], wish: Callable[[Desk, M], Wish]) -> None:
        super().__init__(desk, model)
        self._wish = wish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self.read(scope, receive)
        await deliver(self._desk, self._wish(self._desk, request), scope, receive, send)


class _Computing(_Posted[M]):
    """An endpoint that answers at once."""

    def __init__(self, desk: Desk, model: type[M], answer: Callable[[M], Awaitable[dict[str, Any]]]) -> None:
        super().__init__(desk, model)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self.read(scope, receive)
        await json_response(await self._answer(request))(scope, receive, send)


PARAM_SHOWN = 60


def create_app(desk: Desk) -> ASGIApp:
    """The server as an ASGI application."""
    small = Small(desk)
    published = schema()

    async def openapi(request: Request) -> Response:
        return json_response(published)

    routes = [
        Route("/", small.page),
        Route("/health", small.health),
        Route("/metrics", small.metrics),
        Route("/openapi.json", openapi),
        Route("/v1/models", small.models),
        Route("/v1/models/{name:path}", small.model),
        Route("/v1/chat/completions", _Generating(desk, ChatRequest, chat), methods=["POST"]),
        Route("/v1/completions", _Generating(desk, TextRequest, text), methods=["POST"]),
        Route("/v1/responses", _Generating(desk, ResponsesRequest, responses), methods=["POST"]),
        Route("/v1/messages", _Generating(desk, MessagesRequest, messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", _Computing(desk, CountRequest, partial(count, desk)), methods=["POST"]),
        Route("/tokenize", _Computing(desk, TokenizeRequest, small.tokenize), methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, ApiError: _api_error})
    app.router.redirect_slashes = False

    def done(scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if any(r.path == scope["path"] for r in routes) else "other"
        desk.metrics.requests[path, status] += 1
        desk.metrics.abandoned += status == GONE
        if path.startswith(("/v1/", "/tokenize")):
            desk.say(_line(scope, status, seconds))

    return Guard(app, desk.settings, done, desk.say)


def _line(scope: Scope, status: int, seconds: float) -> str:
    """A request in one line."""
    line = f"{scope['method']} {scope['path']} {status} {seconds:.2f} s"
    statistics = scope["state"].get("statistics")
    if isinstance(statistics, Statistics):
        line += (
            f", prompt {statistics.prompt_tokens} ({statistics.cached_tokens} cached), "
            f"reply {statistics.generated_tokens} tokens, {statistics.decode_tokens_per_second:.1f} tok/s"
        )
    refused = scope["state"].get("refused")
    if isinstance(refused, ApiError):
        line += f", {refused.code}"
        if refused.param:
            line += f": {ascii(refused.param[:PARAM_SHOWN])[1:-1]}"  # a client's own word, which may be anything
    failed = scope["state"].get("failed")
    return line + (f", failed: {failed}" if failed is not None else "")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return ApiError(404, f"There is no {request.method} {request.url.path} here.", code="not_found").response()
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        text = f"{request.url.path} takes {allowed}, not {request.method}."
        return ApiError(405, text, code="method_not_allowed", headers=error.headers).response()
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["state"]["refused"] = error
    return error.response()
