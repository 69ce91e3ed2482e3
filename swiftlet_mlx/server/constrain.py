"""Replies held to JSON: what `response_format` asks for, where the machine can do it."""

from __future__ import annotations

from collections.abc import Callable

from swiftlet_mlx.completion import Completions, Processor

from .failures import unsupported
from .protocol import ResponseFormat

Constraint = Callable[[Completions], tuple[Processor, ...]]


def constrained(wanted: ResponseFormat | None) -> Constraint | None:
    """What makes the logits processors for a response format; None for plain text.

    Raises:
        ApiError: it cannot be honoured.
    """
    if wanted is None or wanted.type == "text":
        return None
    raise unsupported("response_format", f": {wanted.type} cannot be enforced by this server")
