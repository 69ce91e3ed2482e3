"""The OpenAPI description, made from the request models, so that it cannot drift from them."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from swiftlet_mlx import __version__

from .anthropic_protocol import CountRequest, MessagesRequest
from .protocol import ChatRequest, TextRequest, TokenizeRequest
from .responses_protocol import ResponsesRequest

POSTED = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/completions": (TextRequest, "Continue a text"),
    "/v1/responses": (ResponsesRequest, "Answer in the form of OpenAI's Responses"),
    "/v1/messages": (MessagesRequest, "Answer in the form of Anthropic's Messages"),
    "/v1/messages/count_tokens": (CountRequest, "Count a conversation's tokens"),
    "/tokenize": (TokenizeRequest, "Count tokens"),
}
FETCHED = {
    "/v1/models": "The model that is served",
    "/v1/models/{name}": "The model by one of its names",
    "/health": "Whether requests are answered",
    "/metrics": "Figures for Prometheus",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}


def schema() -> dict[str, Any]:
    """The description, version 3.1."""
    models = [(model, "validation") for model, _ in POSTED.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = {"Error": ERROR, **definitions["$defs"]}
    paths: dict[str, Any] = {}
    for path, (model, summary) in POSTED.items():
        body = {"$ref": f"#/components/schemas/{model.__name__}"}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": _responses("application/json", "text/event-stream"),
            }
        }
    for path, summary in FETCHED.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        get: dict[str, Any] = {"summary": summary, "responses": _responses(kind)}
        if "{name}" in path:
            get["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": get}
    return {
        "openapi": "3.1.0",
        "info": {"title": "swiftlet-mlx", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _responses(*kinds: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": {kind: {} for kind in kinds}}}
    for status in ("4XX", "5XX"):
        answers[status] = {"description": "What was wrong", "content": error}
    return answers
