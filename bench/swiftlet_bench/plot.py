"""Pictures of results. Knows matplotlib, which is an extra: `pip install "swiftlet-mlx[plot]"`.

Invariant: every picture says on what machine it was measured, and marks random weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlet_mlx.errors import OptionError

from .report import SYNTHETIC, Row


def cache_curve(rows: Sequence[Row], path: Path) -> None:
    """Decode speed and hit rate by the size of the slot pool, with the spread of the speed.

    Raises:
        OptionError: matplotlib is not installed, or the file's type is unknown to it.
    """
    figure, axes = _begin(rows, "experts in memory, GB", "decode, tok/s")
    x = [row.setting.cache_bytes / 1e9 for row in rows]
    speeds = [row.values["decode_tokens_per_second"] for row in rows]
    below = [s.median - s.low for s in speeds]
    above = [s.high - s.median for s in speeds]
    axes.errorbar(x, [s.median for s in speeds], yerr=[below, above], marker="o", capsize=3, label="tok/s")
    other = axes.twinx()
    other.plot(x, [100 * row["hit_rate"] for row in rows], marker="s", color="tab:orange", label="hits")
    other.set_ylim(0, 100)
    other.set_ylabel("hits, %")
    figure.legend(loc="lower right", bbox_to_anchor=(0.88, 0.15))
    _save(figure, path)


def prefill_curve(rows: Sequence[Row], path: Path) -> None:
    """Prefill speed by the length of the prompt.

    Raises:
        OptionError: see `cache_curve`; or there are no prefill cases.
    """
    read = [row for row in rows if row.case.startswith("prefill")]
    if not read:
        raise OptionError("nothing to draw: no prompt was measured")
    figure, axes = _begin(rows, "prompt, tokens", "prefill, tok/s")
    speeds = [row.values["prefill_tokens_per_second"] for row in read]
    bars = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
    lengths = [row.setting.prompt_tokens for row in read]
    axes.errorbar(lengths, [s.median for s in speeds], yerr=bars, marker="o", capsize=3)
    axes.set_xscale("log", base=2)
    _save(figure, path)


def token_timeline(row: Row, path: Path) -> None:
    """Where the time of one token goes: waiting for reads, and everything else (compute, read-backs, host work).

    Raises:
        OptionError: see `cache_curve`.
    """
    figure, axes = _begin([row], "milliseconds of a token", "")
    whole = 1e3 / row["decode_tokens_per_second"]
    waiting = 1e3 * row["wait_seconds_per_token"]
    axes.barh([0], [whole - waiting], label="compute and host")
    axes.barh([0], [waiting], left=[whole - waiting], label="waiting for reads")
    axes.set_yticks([])
    figure.legend(loc="lower right", bbox_to_anchor=(0.88, 0.15))
    _save(figure, path)


def _begin(rows: Sequence[Row], x: str, y: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError('pictures need matplotlib: pip install "swiftlet-mlx[plot]"') from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    s = rows[0].setting
    name = f"{s.model}, {SYNTHETIC}" if s.synthetic else s.model
    axes.set_title(f"{name}\n{s.chip}, {s.backend}, page cache {s.page_cache}, n = {s.n}", fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{path}: {error}; name a .png or .svg file") from None
