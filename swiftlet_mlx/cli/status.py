"""The line under an answer: what it took, in a few figures.

Knows statistics and widths; prints nothing.
"""

from __future__ import annotations

from swiftlet_mlx.events import Statistics

from .console import size


def figures(s: Statistics, used_bytes: int, context_tokens: int | None) -> list[str]:
    """The figures of a reply, each short enough for a line of its own.

    Args:
        s: the reply's.
        used_bytes: memory in use; 0 if it is not known.
        context_tokens: what the context holds; None if there is no known limit.
    """
    parts = [
        f"{s.generated_tokens} tokens",
        f"{s.decode_tokens_per_second:.1f} tok/s",
        f"first in {s.ttft_seconds:.2f} s",
    ]
    needed = s.counters.get("hits", 0) + s.counters.get("misses", 0)
    if needed:
        parts.append(f"{s.counters['hits'] / needed:.0%} hits")
    if used_bytes:
        parts.append(size(used_bytes))
    total = s.prompt_tokens + s.generated_tokens
    parts.append(f"context {total / context_tokens:.0%}" if context_tokens else f"context {total:,}")
    return parts


def lines_of(parts: list[str], width: int) -> str:
    """The parts with dots between them, on as many lines as a terminal of this width needs; 0 is a pipe."""
    text = parts[0]
    for part in parts[1:]:
        line = text.rsplit("\n", 1)[-1]
        text += f"\n{part}" if width and len(line) + 3 + len(part) > width else f" · {part}"
    return text
