"""What a running reply tells its reader: frozen dataclasses, nothing else.

Knows nothing of MLX, tokenizers or HTTP. The order in every reply is

    Started  Progress*  (ThinkingDelta | TextDelta | ToolCall)*  Statistics  Finish

Finish is always the last event and comes exactly once. A reply that fails raises instead of finishing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
"""stop: an end token or a stop string. length: the budget of tokens is used up. tool_calls: at least one
ToolCall was sent and the model ended its turn. cancelled: the reader asked for the end."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its log-probability under the unmodified model (before penalties and temperature)."""

    id: int
    text: str
    """As decoded alone; U+FFFD where the token is a piece of a character. `bytes` is exact."""
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this place, best first; their own `top` is empty."""


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has taken the request up: its turn has come and the prompt is about to be read."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that a checkpoint already held. Always less than prompt_tokens."""
    max_tokens: int
    """The budget after clamping to what the context still holds."""
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the prompt has been read. Sent after each piece of a long prompt, never for a short one."""

    done: int
    """Tokens read, cached ones included."""
    total: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer. All of them together are the answer, character for character."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """The tokens that became visible with this delta; empty unless log-probabilities were asked for."""


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More of the model's thoughts. Never part of the answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole, well-formed call. A malformed or cut one arrives as TextDelta with its raw text instead."""

    index: int
    id: str
    name: str
    arguments: str
    """A JSON object as text, the form that OpenAI clients expect."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """The figures of one reply. Seconds are wall time; bytes and counts are this reply's own."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Tokens sampled, thoughts included, the end token not counted."""
    thinking_tokens: int
    queue_seconds: float
    prefill_seconds: float
    ttft_seconds: float
    """From submission to the first sampled token, queue included."""
    decode_seconds: float
    counters: dict[str, int] = field(default_factory=dict)
    """What the model's own counters grew by during this reply (hits, misses, read_bytes); empty for a model
    without streamed experts."""
    prefill_counters: dict[str, int] = field(default_factory=dict)
    """The part of `counters` up to the first sampled token."""
    ids: tuple[int, ...] = ()
    """The tokens sampled, the end token not among them."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens actually read (cached ones left out) a second."""
        read = self.prompt_tokens - self.cached_tokens
        return read / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens a second after the first one, which belongs to the prefill."""
        later = self.generated_tokens - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end. Nothing follows."""

    reason: FinishReason
    stop: str | None = None
    """The stop string that ended the reply, if one did."""


Event = Started | Progress | TextDelta | ThinkingDelta | ToolCall | Statistics | Finish
