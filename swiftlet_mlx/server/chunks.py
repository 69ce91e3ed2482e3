"""What OpenAI's two older endpoints share: the head of an answer, its token counts, and the chunks of a stream.

Knows the envelope; what a choice holds is the endpoint's. Invariant: an answer and the chunks of a stream have the same
head and the same usage.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from swiftlet_mlx import __version__
from swiftlet_mlx.events import Event, Progress, Statistics

from .desk import Desk
from .failures import ApiError, dumps
from .protocol import StreamOptions

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API says this for "as good as impossible"
DONE = b"data: [DONE]\n\n"


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What every answer begins with.

    Args:
        prefix: Of its id.
        kind: Its `object`.
        model: The name that clients use.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"swiftlet-mlx-{__version__}",
    }


def usage(all_statistics: Sequence[Statistics]) -> dict[str, Any]:
    """Token counts of a request's choices together. A prompt counts once, as does what was cached of it."""
    first = all_statistics[0] if all_statistics else None
    prompt = first.prompt_tokens if first else 0
    generated = sum(s.generated_tokens for s in all_statistics)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens if first else 0},
        "completion_tokens_details": {"reasoning_tokens": sum(s.thinking_tokens for s in all_statistics)},
    }


class ChunkWriter:
    """The chunks of one streamed request; a subclass says what a choice's chunks hold.

    Args:
        head: What every chunk begins with.
        desk: Knows the memory, for clients that ask for it.
        options: What the client asked for beside the text.
        counts: Makes the usage of all choices.
    """

    heartbeat = b": still here\n\n"

    def __init__(
        self,
        head: dict[str, Any],
        desk: Desk,
        options: StreamOptions | None,
        counts: Callable[[Sequence[Statistics]], dict[str, Any]] = usage,
    ) -> None:
        self._head, self._desk, self._counts = head, desk, counts
        self._options = options or StreamOptions()
        self._tail = {"usage": None} if self._options.include_usage else {}
        self._all: list[Statistics] = []

    def event(self, choice: int, event: Event) -> bytes:
        if isinstance(event, Statistics):
            self._all.append(event)
            return b""
        if isinstance(event, Progress):
            return self._progress(event) if self._options.include_progress else b""
        return self.said(choice, event)

    def said(self, choice: int, event: Event) -> bytes:
        """The chunks of an event that belongs to a choice; empty if it makes none."""
        raise NotImplementedError

    def chunk(self, choice: int, **fields: Any) -> bytes:
        """One chunk of a choice."""
        return frame({**self._head, "choices": [{"index": choice, **fields}], **self._tail})

    def end(self) -> bytes:
        options, frames = self._options, b""
        if options.include_usage or options.include_statistics:
            body = {**self._head, "choices": [], "usage": self._counts(self._all)}
            if options.include_statistics and self._all:
                body["statistics"] = figures(self._desk, self._all[-1])
            frames = frame(body)
        return frames + DONE

    def failed(self, error: ApiError) -> bytes:
        return frame({"error": error.error}) + DONE

    def _progress(self, event: Progress) -> bytes:
        return frame({**self._head, "choices": [], "progress": {"done": event.done, "total": event.total}})


def frame(body: dict[str, Any]) -> bytes:
    """A server-sent event with a JSON object."""
    return b"data: " + dumps(body) + b"\n\n"


def figures(desk: Desk, s: Statistics) -> dict[str, Any]:
    """A reply's figures, for clients that ask for them."""
    return {
        "queue_seconds": s.queue_seconds,
        "prefill_seconds": s.prefill_seconds,
        "ttft_seconds": s.ttft_seconds,
        "decode_seconds": s.decode_seconds,
        "prefill_tokens_per_second": s.prefill_tokens_per_second,
        "decode_tokens_per_second": s.decode_tokens_per_second,
        **{name: s.counters[name] for name in ("hits", "misses", "read_bytes") if name in s.counters},
        **desk.memory(),
    }
