"""Pictures of results. Knows matplotlib, which is an extra: `pip install "swiftlet-mlx[plot]"`.

Invariant: every picture says on what machine it was measured, and marks random weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlet_mlx.errors import OptionError

from .harness import Setting
from .report import SYNTHETIC, Row
from .timeline import Timeline

SUFFIXES = (".png", ".svg", ".pdf")


def cache_curve(rows: Sequence[Row], path: Path) -> None:
    """Decode speed and hit rate by the size of the slot pool, with the spread of the speed.

    Raises:
        OptionError: matplotlib is not installed, or the file's type is unknown to it.
    """
    figure, (axes,) = _begin(rows[0].setting, 1)
    axes.set_xlabel("experts in memory, GB")
    axes.set_ylabel("decode, tok/s")
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


def timeline(setting: Setting, token: Timeline, path: Path) -> None:
    """One token: the engine thread above, the read threads below it.

    Raises:
        OptionError: see `cache_curve`.
    """
    figure, (axes,) = _begin(setting, 1)
    ms = 1e3
    axes.broken_barh([(0, ms * token.seconds)], (-0.4, 0.8), facecolors="0.85", label="host work and the rest")
    colors = {"evaluate": "tab:blue", "wait": "tab:red", "read": "tab:green"}
    names = {"evaluate": "evaluating", "wait": "waiting for reads", "read": "reading"}
    rows = 1 + max((span.thread + 1 for span in token.spans if span.kind == "read"), default=0)
    for kind, color in colors.items():
        for row in range(rows):
            mine = [s for s in token.spans if s.kind == kind and (s.thread + 1 if kind == "read" else 0) == row]
            bars = [(ms * s.start, ms * (s.end - s.start)) for s in mine]
            label = names[kind] if row == (kind == "read") else None
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, label=label)
    axes.set_yticks(range(rows), ["engine", *(f"read thread {n + 1}" for n in range(rows - 1))], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, ms * token.seconds)
    axes.set_xlabel("milliseconds of one token")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize=8)
    _save(figure, path)


def page(rows: Sequence[Row], path: Path) -> None:
    """The prefill curve, and below it where the time of one token goes.

    Raises:
        OptionError: see `cache_curve`; or no prompt was measured.
    """
    read = [row for row in rows if row.case.startswith("prefill")]
    if not read:
        raise OptionError("nothing to draw: no prompt was measured")
    figure, (upper, lower) = _begin(rows[0].setting, 2)
    speeds = [row.values["prefill_tokens_per_second"] for row in read]
    bars = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
    lengths = [r.setting.prompt_tokens for r in read]
    upper.errorbar(lengths, [s.median for s in speeds], yerr=bars, marker="o", capsize=3)
    upper.set_xscale("log", base=2)
    upper.set_xticks(lengths, [str(n) for n in lengths])
    upper.set_xlabel("prompt, tokens")
    upper.set_ylabel("prefill, tok/s")
    row = next(row for row in rows if "wait_seconds_per_token" in row.values)
    whole, waiting = 1e3 / row["decode_tokens_per_second"], 1e3 * row["wait_seconds_per_token"]
    lower.barh([0], [whole - waiting], label="compute, read-backs, host work")
    lower.barh([0], [waiting], left=[whole - waiting], label="waiting for reads")
    lower.set_yticks([])
    lower.set_xlabel("milliseconds of a token")
    lower.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5), ncols=2, fontsize=8)
    _save(figure, path)


def check(path: Path) -> None:
    """Refuse a picture that cannot be made, before what it is to show is measured.

    Raises:
        OptionError: matplotlib is not installed, the file's type is none of `SUFFIXES`, or its folder is not there.
    """
    _figure_class()
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(f"{path}: pictures are of type {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise OptionError(f"{path}: there is no folder {path.parent}")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("pictures need matplotlib: pip install matplotlib") from None
    return Figure


def _begin(setting: Setting, n: int) -> tuple[Any, list[Any]]:
    figure = _figure_class()(figsize=(7, 4 + 2 * (n - 1)), layout="constrained")
    parts = figure.subplots(n, 1, squeeze=False, height_ratios=[3, *[1] * (n - 1)])
    axes = [part for (part,) in parts]
    s = setting
    name = f"{s.model}, {SYNTHETIC}" if s.synthetic else s.model
    axes[0].set_title(f"{name}\n{s.chip}, {s.backend}, page cache {s.page_cache}, n = {s.n}", fontsize=9)
    axes[0].grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(path, dpi=150)
    except ValueError as error:
        raise OptionError(f"{path}: {error}; name a .png or .svg file") from None
