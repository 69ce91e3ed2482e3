"""Tables of what `decode` and `prefill` have measured on machines that are lent for minutes: JSON lines as they came.

Knows the lines' names; measures nothing. A file is `DATE-decode-MACHINE.jsonl` or `DATE-prefill-MACHINE.jsonl`: lines
whose `case` is "setting" say what holds for those after them, and, in the first one's case, before it. Invariant: a
number appears with its model, its settings, its count and the commit, and what a line does not say stays empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swiftlet_mlx.units import size

from .report import ResultsError

Line = Mapping[str, Any]
DECODE = ("machine", "model", "experts in memory", "decode tok/s (80 % of tokens)", "hits", "read", "waiting",
          "times resident", "times the larger of reads and compute", "n", "date, commit, settings")  # fmt: skip
PREFILL = ("machine", "model", "case", "tokens", "seconds", "prefill tok/s", "read", "date, commit, settings")
_SETTINGS = ("variant", "threads", "page_cache", "pool", "cache_gb", "slots_per_layer", "cuda_memory_advice",
             "mlx_cache_limit_bytes", "pool_state")  # fmt: skip


def tables(folder: Path) -> str:
    """Both tables as Markdown, of every file of a folder; a table without rows is left out.

    Raises:
        ResultsError: a file is not as `decode` and `prefill` write them.
    """
    parts = []
    for what, columns, row in (("decode", DECODE, _decode), ("prefill", PREFILL, _prefill)):
        rows = []
        for path in sorted(folder.glob(f"*-{what}-*.jsonl")):
            date = path.name[:10]
            rows += [cells for setting, line in _lines(path) if (cells := row(date, setting, line))]
        if rows:
            parts.append("\n".join(_markdown(cells) for cells in (columns, ["---"] * len(columns), *rows)) + "\n")
    return "\n".join(parts)


def _lines(path: Path) -> Iterator[tuple[Line, Line]]:
    """Each line of a file with the settings that hold for it."""
    try:
        found = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
        setting = next(line for line in found if line["case"] == "setting")
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ResultsError(f"{path}: lines of JSON with a `case`, one of them a setting, were expected") from error
    for line in found:
        if line["case"] == "setting":
            setting = line
        else:
            yield setting, line


def _decode(date: str, setting: Line, line: Line) -> list[str] | None:
    if "step_seconds" not in line:
        return None
    share = line["case"]
    held = f"{share:.0%}, {size(line['cache_bytes'])}" if isinstance(share, float) else f"all ({share})"
    speed = f"{line['tokens_per_second']:.3g} ({1 / line['p90_seconds']:.3g}-{1 / line['p10_seconds']:.3g})"
    return [
        str(setting.get("machine", "")), str(setting.get("model", "")), held, speed,
        _of(line, "hit_rate", "{:.0%}"), f"{size(line['read_bytes'])}/token" if line.get("read_bytes") else "",
        f"{1e3 * line['wait_seconds']:.3g} ms/token" if line.get("wait_seconds") else "",
        _of(line, "over_resident", "{:.2f}"), _of(line, "over_bound", "{:.2f}"), str(line["n"]),
        _where(date, setting, line),
    ]  # fmt: skip


def _prefill(date: str, setting: Line, line: Line) -> list[str] | None:
    if "tokens" not in line or str(line["case"]).startswith("gated delta"):
        return None
    n, seconds = line["tokens"], line.get("seconds")
    speeds = {
        "": line.get("tokens_per_second", n / seconds if seconds else None),
        "layer by layer": line.get("layer_major_tokens_per_second"),
        "mlx-lm's way": line.get("mlx_lm_tokens_per_second"),
    }
    said = ", ".join(f"{value:.4g} {name}".strip() for name, value in speeds.items() if value)
    read = line.get("read_bytes")
    return [
        str(setting.get("machine", "")), str(setting.get("model", "")), str(line["case"]), str(n),
        _of(line, "seconds", "{:.3g}"), said, size(read) if read else "", _where(date, setting, line),
    ]  # fmt: skip


def _where(date: str, setting: Line, line: Line) -> str:
    """Where a number comes from: the line's own settings before those of the run."""
    both = {**setting, **line}
    commit = both.get("commit", "")
    named = [f"{key.replace('_', ' ')} {_value(key, both[key])}" for key in _SETTINGS if key in both]
    return ", ".join([date, *([str(commit)] if commit else []), *named])


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return size(value) if key.endswith("_bytes") else str(value)


def _of(line: Line, key: str, how: str) -> str:
    return how.format(line[key]) if line.get(key) is not None else ""


def _markdown(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
