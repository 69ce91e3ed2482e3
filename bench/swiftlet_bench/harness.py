"""Runs that can be compared: what was set, values with their spread, and cases measured in turn.

Knows numbers and settings; no models, no output. Invariants: two results are put side by side only if every setting
but the one that is studied is the same; a value never travels without its count and spread; cases take turns (A B A
B), so that a machine that warms up or is disturbed harms all of them alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

from swiftlet_mlx import warm
from swiftlet_mlx.errors import SwiftletError

# A spread wider than this says more about the machine than about the program.
NOISY_SPREAD = 0.15
# Last against first: a machine that heats up, or something that runs beside the measurement.
DRIFT = 0.10

Values = Mapping[str, float]


class NotComparable(SwiftletError):
    """Two results were made with different settings."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything it takes to repeat a measurement, and to know what may be compared with it.

    `page_cache` is `cold`, `warm`, `part` or `unknown`, as found when the run began. `model_hash` names the bytes of
    the model as far as its manifest or index does; `prompt_hash` the token ids.
    """

    machine: str
    chip: str
    system: str
    backend: str
    device: str
    memory_bytes: int
    versions: str
    commit: str
    engine: str
    model: str
    model_hash: str
    synthetic: bool
    cache_bytes: int
    threads: int
    io: str
    page_cache: str
    prompt_tokens: int
    prompt_hash: str
    max_tokens: int
    warm_up: int
    n: int

    def differences(self, other: Setting) -> dict[str, tuple[object, object]]:
        """Fields in which two settings differ."""
        mine, theirs = asdict(self), asdict(other)
        return {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}


def check_comparable(settings: Sequence[Setting], varying: Iterable[str] = ()) -> None:
    """Refuse to put results side by side that were not made alike.

    Args:
        settings: Of the results.
        varying: Fields that are being studied and may differ.

    Raises:
        NotComparable: naming the fields and their values.
        ValueError: `varying` names a field that does not exist.
    """
    allowed = set(varying)
    unknown = allowed - {f.name for f in fields(Setting)}
    if unknown:
        raise ValueError(f"no such setting: {', '.join(sorted(unknown))}")
    for first, second in pairwise(settings):
        wrong = {k: v for k, v in first.differences(second).items() if k not in allowed}
        if wrong:
            listed = "; ".join(f"{k}: {a!r} and {b!r}" for k, (a, b) in wrong.items())
            raise NotComparable(f"these results were made with different settings ({listed}); measure both in one run")


@dataclass(frozen=True, slots=True)
class Spread:
    """Several values of one quantity."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a spread of no values")

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def relative(self) -> float:
        """Distance of the extremes, as a share of the median."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0

    def flags(self) -> list[str]:
        """What a reader must know before believing the median."""
        found = []
        if self.n < 3:
            found.append(f"only {self.n} run{'s' if self.n > 1 else ''}")
        if self.relative > NOISY_SPREAD:
            found.append(f"noisy: spread {self.relative:.0%}")
        if self.n >= 3 and self.median:
            drift = (self.values[-1] - self.values[0]) / abs(self.median)
            steady = all(a <= b for a, b in pairwise(self.values)) or all(a >= b for a, b in pairwise(self.values))
            if steady and abs(drift) > DRIFT:
                found.append(f"drifting: {drift:+.0%} from first to last (heat, or other work on the machine)")
        return found


def in_turn(
    cases: Mapping[str, Callable[[], Values]],
    rounds: int,
    warm_up: int = 1,
    before_each: Callable[[str], None] = lambda name: None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, dict[str, Spread]]:
    """Measure cases A B A B ...; the warm-up rounds are run and dropped.

    Args:
        cases: Name to a function that runs the case once and returns its values, always under the same names.
        rounds: That count.
        warm_up: Rounds before, that do not.
        before_each: Called before every run, outside what is timed: to empty a cache, say.
        progress: Called with runs done, runs in all, and the case at work.

    Returns:
        Case name to quantity to values, in the order of the rounds.

    Raises:
        ValueError: for no cases, no rounds, or a case whose quantities change from run to run.
    """
    if not cases or rounds < 1 or warm_up < 0:
        raise ValueError("at least one case and one round are needed")
    found: dict[str, list[Values]] = {name: [] for name in cases}
    total, done = (rounds + warm_up) * len(cases), 0
    for turn in range(rounds + warm_up):
        for name, case in cases.items():
            progress(done, total, name)
            before_each(name)
            values = case()
            done += 1
            if turn >= warm_up:
                found[name].append(values)
    progress(done, total, "done")
    return {name: collect(runs) for name, runs in found.items()}


def collect(runs: Sequence[Values]) -> dict[str, Spread]:
    """Values of several runs of one case, quantity by quantity.

    Raises:
        ValueError: the runs do not measure the same quantities.
    """
    names = set(runs[0])
    if any(set(run) != names for run in runs):
        raise ValueError("the runs of a case do not measure the same quantities")
    return {name: Spread(tuple(float(run[name]) for run in runs)) for name in runs[0]}


def ratio(first: Spread, second: Spread) -> Spread:
    """How many times the second the first is, round by round: what disturbed a round disturbed both.

    Raises:
        ValueError: if they were not measured in the same rounds.
    """
    if first.n != second.n:
        raise ValueError(f"{first.n} and {second.n} rounds do not belong together")
    return Spread(tuple(a / b for a, b in zip(first.values, second.values, strict=True)))


def model_hash(folder: Path) -> str:
    """A short name for a model's bytes: from its hashes where it has them, else from what lists names and sizes."""
    return warm.model_hash(folder)[:12]
