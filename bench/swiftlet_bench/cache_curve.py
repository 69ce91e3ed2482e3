"""How speed, hits and memory follow from the size of the slot pool.

Knows budgets and children. Invariant: budgets take turns, each run in a process of its own with the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from swiftlet_mlx import memory
from swiftlet_mlx.config import ModelConfig, read_config
from swiftlet_mlx.reader import open_source
from swiftlet_mlx.units import size

from . import children
from .harness import Setting, check_comparable, in_turn
from .report import Row, today

SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)


def budgets(folder: Path, shares: Sequence[float] = SHARES) -> list[float]:
    """Slot pools in GB: the smallest that is legal, what one token touches, and shares of all experts; ascending."""
    source, opened = open_source(folder)
    source.close()
    config = ModelConfig.from_dict(read_config(folder), str(folder))
    least = memory.minimum_bytes(source.tables, config.top_k)
    cycle = memory.cycle_bytes(source.tables, config.top_k)
    wanted = {least, cycle, *(round(opened.expert_bytes * share) for share in shares)}
    # a budget is rounded to whole bytes once more when it is read; one byte more keeps it from falling below
    return [(n + 1) / 1e9 for n in sorted(wanted) if n >= least]


def measure(
    folder: Path,
    cache_gb: Sequence[float],
    *,
    prompt_tokens: int = 64,
    max_tokens: int = 64,
    rounds: int = 3,
    cold: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Row]:
    """Measure decoding at several budgets.

    Args:
        folder: A container or checkpoint folder.
        cache_gb: Slot pools in GB.
        prompt_tokens: Length of the prompts, of which every round has another.
        max_tokens: To generate.
        rounds: That count; there is no warm-up round, since every run is a fresh process. Each runs a short prompt
            first, to compile kernels.
        cold: Empty the page cache before each run.
        progress: Called with runs done, runs in all, and the budget.

    Returns:
        A row a budget.

    Raises:
        ChildFailed: a run failed.
    """
    settings: dict[str, Setting] = {}
    seeds: dict[str, int] = {}

    def once(gb: float, name: str) -> Mapping[str, float]:
        seed = seeds[name] = seeds.get(name, -1) + 1
        got = children.one(
            folder, prompt_tokens=prompt_tokens, max_tokens=max_tokens, seed=seed, cache_gb=gb, cold=cold, warm_up=1
        )
        settings.setdefault(name, got.setting)
        return got.values

    cases = {size(gb * 1e9): partial(once, gb, size(gb * 1e9)) for gb in cache_gb}
    found = in_turn(cases, rounds, 0, progress=progress)
    made = [replace(s, n=rounds) for s in settings.values()]
    check_comparable(made, ("cache_bytes", "page_cache"))
    return [Row(name, setting, found[name], today()) for name, setting in zip(settings, made, strict=True)]


def curve(rows: Sequence[Row], all_experts_bytes: int) -> list[tuple[float, float]]:
    """(share of experts held, hit rate) for `predict`, ascending, from nothing held to everything."""
    points = [(row.setting.cache_bytes / all_experts_bytes, row["hit_rate"]) for row in rows]
    return sorted({(0.0, 0.0), *points, (1.0, 1.0)})
