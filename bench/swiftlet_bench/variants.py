"""What MLX's own switches are worth here: the same model under several environments, in turn.

Knows names of variables and children. They are read once, when MLX starts, so each run is a process of its own.
Invariant: a variant is recommended only if it was faster in every round, by more than noise, with the same output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import children
from .harness import Spread, in_turn, ratio

# Public reports: a fence of 180 us becomes 4 (M3 Ultra), larger command buffers gain 5 to 8 %. Only Metal reads them.
METAL: Mapping[str, Mapping[str, str]] = {
    "as shipped": {},
    "fast fences": {"MLX_METAL_FAST_SYNCH": "1"},
    "large buffers": {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "200"},
    "both": {"MLX_METAL_FAST_SYNCH": "1", "MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "200"},
}
WORTH = 1.05


@dataclass(frozen=True, slots=True)
class Tried:
    """A variant: decode speed, its ratio to the first one round by round, whether the output was the same."""

    name: str
    environment: Mapping[str, str]
    speed: Spread
    times: Spread
    same_output: bool

    @property
    def worth_it(self) -> bool:
        """Whether it may be recommended."""
        return self.same_output and self.times.low > 1 and self.times.median >= WORTH


def measure(
    folder: Path,
    variants: Mapping[str, Mapping[str, str]] = METAL,
    *,
    cache_gb: float | None = None,
    max_tokens: int = 64,
    rounds: int = 3,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Tried]:
    """Measure decoding under each environment.

    Args:
        folder: A container or checkpoint folder.
        variants: Name to environment; the first is what the others are compared with.
        cache_gb: Slot pool in GB.
        max_tokens: To generate.
        rounds: That count.
        progress: Called with runs done, runs in all, and the variant.

    Raises:
        ChildFailed: a run failed.
    """
    outputs: dict[str, set[str]] = {name: set() for name in variants}

    def once(name: str) -> Mapping[str, float]:
        got = children.one(
            folder, prompt_tokens=32, max_tokens=max_tokens, cache_gb=cache_gb, warm_up=1, environment=variants[name]
        )
        outputs[name].add(got.output)
        return {"speed": got.values["decode_tokens_per_second"]}

    found = in_turn({name: partial(once, name) for name in variants}, rounds, 0, progress=progress)
    first = next(iter(variants))
    return [
        Tried(
            name,
            variants[name],
            found[name]["speed"],
            ratio(found[name]["speed"], found[first]["speed"]),
            outputs[name] == outputs[first],
        )
        for name in variants
    ]


def recommended(tried: list[Tried]) -> Mapping[str, str]:
    """The environment of the fastest variant that is worth it; empty if none is."""
    worth = [t for t in tried if t.worth_it]
    return max(worth, key=lambda t: t.times.median).environment if worth else {}
