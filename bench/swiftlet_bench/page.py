"""One page about one model on this machine: how it loads, reads prompts of several lengths, and decodes.

Knows the subject and the harness; formats nothing. Invariant: all cases of a page are measured in turn in one process
with one loaded model, so that they can be compared; the pool holds what the run before has left, as in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swiftlet_mlx.reader import IO, IO_THREADS

from . import pagecache
from .harness import Spread, in_turn
from .report import Row, today
from .subject import Subject, opened

LENGTHS = (128, 512, 2048)
DECODE_PROMPT = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Args:
        lengths: Prompt lengths in tokens.
        tokens: Generated in a decode run.
        rounds: That count.
        warm_up: Rounds before, that do not.
        cold: Empty the page cache before every run.
    """

    lengths: Sequence[int] = LENGTHS
    tokens: int = 64
    rounds: int = 3
    warm_up: int = 1
    cold: bool = False


def measure(
    folder: Path,
    plan: Plan,
    *,
    cache_gb: float | None = None,
    threads: int = IO_THREADS,
    io: IO = "cached",
    stock: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[list[Row], Mapping[str, float]]:
    """Measure a model.

    Args:
        folder: A container or checkpoint folder.
        plan: What to measure.
        cache_gb: Slot pool in GB.
        threads: That read experts.
        io: `cached` or `direct`.
        stock: By mlx-lm alone, every expert in memory.
        progress: Called with runs done, runs in all, and the case.
        warn: Called with remarks.

    Returns:
        Rows, decode first, and the sizes that a prediction needs (empty for a resident model).

    Raises:
        CannotEvict: a cold run was asked for where there can be none.
        SwiftletError: the model cannot be loaded.
    """
    if plan.cold:
        pagecache.evict(folder)
    with opened(folder, cache_gb=cache_gb, threads=threads, io=io, stock=stock, warn=warn) as subject:
        cases = {"decode": (DECODE_PROMPT, plan.tokens), **{f"prefill {n}": (n, 1) for n in plan.lengths}}
        found = in_turn(
            {name: _repeated(subject, *case) for name, case in cases.items()},
            plan.rounds,
            plan.warm_up,
            before_each=lambda name: pagecache.evict(folder) if plan.cold else None,
            progress=progress,
        )
        load = {"load_seconds": subject.load_seconds, "load_peak_bytes": float(subject.load_peak_bytes)}
        state = "cold" if plan.cold else pagecache.state(pagecache.cached_share(folder))
        rows = []
        for name, (n_prompt, n_tokens) in cases.items():
            setting = subject.setting(subject.prompt(n_prompt), n_tokens, plan.rounds, plan.warm_up)
            values = {**found[name], **{k: Spread((v,)) for k, v in load.items()}}
            rows.append(Row(name, replace(setting, page_cache=state), values, today()))
        return rows, subject.sizes()


def _repeated(subject: Subject, n_prompt: int, n_tokens: int) -> Callable[[], Mapping[str, float]]:
    """A case whose every run has a prompt of its own, the same ones on every machine."""
    seeds = iter(range(1 << 30))
    return lambda: subject.run(subject.prompt(n_prompt, next(seeds)), n_tokens)
