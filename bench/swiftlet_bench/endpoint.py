"""A server that speaks OpenAI's completions, measured from outside: what its clients get, whatever it runs.

Knows HTTP and server-sent events by the standard library. Invariant: tokens are the server's own count (`usage`), and
where it gives none there is no rate.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from swiftlet_mlx.errors import SwiftletError

TIMEOUT_SECONDS = 1800.0


class EndpointFailed(SwiftletError):
    """A server under measurement did not answer as an OpenAI-compatible one does."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server by its base URL, `http://127.0.0.1:8080/v1`."""

    url: str
    model: str | None = None

    def name(self) -> str:
        """The model it serves: the one asked for, or the first it lists.

        Raises:
            EndpointFailed: it cannot be asked.
        """
        if self.model:
            return self.model
        with_status = self._call("GET", "/models", None)
        try:
            return str(json.loads(with_status.read())["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise EndpointFailed(f"{self.url}/models lists no model; name one with --url-model") from None

    def complete(self, prompt: str, max_tokens: int) -> tuple[dict[str, float], int]:
        """Stream one greedy completion.

        Returns:
            (values as of `Subject.run`, prompt tokens as the server counts them).

        Raises:
            EndpointFailed: it refuses, breaks off, or does not count tokens.
        """
        body = {
            "model": self.name(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        start = time.perf_counter()
        response = self._call("POST", "/completions", body)
        times: list[float] = []
        usage: dict[str, Any] = {}
        for event in _events(response):
            usage = event.get("usage") or usage
            choices = event.get("choices") or []
            piece = choices[0].get("text") if choices else ""
            if piece:
                times.append(time.perf_counter())
        if not times or not usage:
            raise EndpointFailed(f"{self.url}: no text or no token counts came back; it must support stream_options")
        prompt_tokens, tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        values = {"ttft_seconds": times[0] - start, "prefill_tokens_per_second": prompt_tokens / (times[0] - start)}
        values["generated_tokens"] = tokens
        if tokens > 1 and times[-1] > times[0]:
            values["decode_tokens_per_second"] = (tokens - 1) / (times[-1] - times[0])
        return values, prompt_tokens

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            connection = kind(parts.netloc, timeout=TIMEOUT_SECONDS)
            data = None if body is None else json.dumps(body)
            connection.request(method, parts.path.rstrip("/") + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EndpointFailed(f"{self.url}: cannot be reached ({error})") from None
        if response.status != 200:
            raise EndpointFailed(f"{self.url}{path}: answered {response.status}: {response.read(300)!r}")
        return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    for raw in response:
        line = raw.decode("utf-8", "replace").strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data:"):
            try:
                event = json.loads(line[5:])
            except ValueError:
                raise EndpointFailed(f"a broken event came from the server: {line[:100]!r}") from None
            if isinstance(event, dict):
                yield event
