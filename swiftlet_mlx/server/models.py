"""The small routes: models, health, metrics, tokenize, the web page. No generation.

Knows the desk and the shapes of these answers.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swiftlet_mlx import __version__

from .asking import Conversation
from .desk import Desk
from .failures import ApiError, dumps
from .protocol import TokenizeRequest


def _page_headers(page: bytes) -> dict[str, str]:
    """Nothing from elsewhere, no script or style but the page's own (by hash), and no other page may frame it."""
    script, style = (_hash(page, tag) for tag in (b"script", b"style"))
    policy = {
        "default-src": "'none'",
        "script-src": script,
        "style-src": style,
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _hash(page: bytes, tag: bytes) -> str:
    inside = page.split(b"<" + tag + b">", 1)[1].split(b"</" + tag + b">", 1)[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"


def json_response(body: Any, status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")


class Small:
    """Handlers that need the desk only."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._page = (resources.files("swiftlet_mlx.server") / "page.html").read_bytes()
        self._page_headers = _page_headers(self._page)

    async def models(self, request: Request) -> Response:
        """GET /v1/models, with the fields of Anthropic's list beside OpenAI's."""
        own = self._model(self._desk.settings.model_id)
        return json_response(
            {
                "object": "list",
                "data": [own],
                "has_more": False,
                "first_id": own["id"],
                "last_id": own["id"],
            }
        )

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name = request.path_params["name"]
        if not name:
            raise ApiError(404, "There is no model without a name.", param="model", code="model_not_found")
        self._desk.check_model(name)
        return json_response(self._model(name))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while requests are answered, 503 otherwise."""
        desk = self._desk
        state = "stopping" if desk.stopping else desk.health
        body = {
            "status": state,
            "model": desk.settings.model_id,
            "in_flight": desk.in_flight,
            "waiting": max(0, desk.in_flight - 1),
            "version": __version__,
        }
        return json_response(body, 200 if state in ("ready", "busy") else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        desk = self._desk
        gauges = {
            "ready": float(desk.health in ("ready", "busy")),
            "requests_in_flight": desk.in_flight,
            "requests_waiting": max(0, desk.in_flight - 1),
            **desk.memory(),
        }
        text = desk.metrics.text(gauges, desk.counters())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """POST /tokenize."""
        desk = self._desk
        completions, text = desk.completions, request.prompt
        if request.messages is not None:
            conversation = Conversation(
                messages=[m.plain() for m in request.messages],
                tools=tuple(t.plain() for t in request.tools or ()),
                thinking=request.enable_thinking,
            )
            conversation.check(desk.settings, desk.engine.context_tokens)
            tokens = await desk.prompt_ids(conversation)
        else:
            tokens = await desk.checked(
                lambda: list(completions.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)),
                len(text or ""),
            )
        return {"tokens": tokens, "count": len(tokens), "max_model_len": desk.engine.context_tokens}

    async def page(self, request: Request) -> Response:
        """GET /."""
        return Response(self._page, media_type="text/html; charset=utf-8", headers=self._page_headers)

    def _model(self, name: str) -> dict[str, Any]:
        desk = self._desk
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "created": desk.started,
            "created_at": datetime.fromtimestamp(desk.started, UTC).isoformat().replace("+00:00", "Z"),
            "display_name": name,
            "lifecycle": "active",
            "owned_by": "swiftlet-mlx",
            "context_window": desk.engine.context_tokens,
            "max_model_len": desk.engine.context_tokens,
        }
