"""Counters of a server, and their text for Prometheus. Plain numbers; used on the event loop's thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swiftlet_mlx.events import Statistics

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(slots=True)
class Histogram:
    """Counts of values up to each bound."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    n: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.bounds)

    def add(self, value: float) -> None:
        self.n += 1
        self.total += value
        for i, bound in enumerate(self.bounds):
            self.counts[i] += value <= bound

    def lines(self, name: str) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        for bound, count in zip(self.bounds, self.counts, strict=True):
            yield f'{name}_bucket{{le="{bound:g}"}} {count}'
        yield f'{name}_bucket{{le="+Inf"}} {self.n}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {self.n}"


@dataclass(slots=True)
class Metrics:
    """What has happened since the start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    abandoned: int = 0
    refused: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    reply_seconds: float = 10.0
    """How long a reply takes, lately: for Retry-After."""

    def answered(self, statistics: Statistics) -> None:
        """Take a reply's figures."""
        self.prompt_tokens += statistics.prompt_tokens
        self.cached_tokens += statistics.cached_tokens
        self.generated_tokens += statistics.generated_tokens
        self.ttft.add(statistics.ttft_seconds)
        self.queue.add(statistics.queue_seconds)
        took = statistics.prefill_seconds + statistics.decode_seconds
        self.reply_seconds += 0.3 * (took - self.reply_seconds)

    def text(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> str:
        """Prometheus text, format 0.0.4.

        Args:
            gauges: further values that rise and fall.
            counters: further values that only rise.
        """
        lines = ["# TYPE swiftlet_requests_total counter"]
        for (endpoint, status), n in sorted(self.requests.items()):
            lines.append(f'swiftlet_requests_total{{endpoint="{endpoint}",status="{status}"}} {n}')
        own = {
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens, "abandoned_requests": self.abandoned,
            "refused_requests": self.refused,
        }  # fmt: skip
        for name, value in {**own, **counters}.items():
            lines += [f"# TYPE swiftlet_{name}_total counter", f"swiftlet_{name}_total {value:.16g}"]
        for name, value in gauges.items():
            lines += [f"# TYPE swiftlet_{name} gauge", f"swiftlet_{name} {value:.16g}"]
        lines += self.ttft.lines("swiftlet_time_to_first_token_seconds")
        lines += self.queue.lines("swiftlet_queue_seconds")
        return "\n".join(lines) + "\n"
