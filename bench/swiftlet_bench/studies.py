"""Tables of what `decode` and `prefill` have measured on machines that are lent for minutes: JSON lines as they came.

Knows the lines' names; measures nothing. A file is `DATE-decode-MACHINE.jsonl` or `DATE-prefill-MACHINE.jsonl`. A line
whose `case` is "setting" says what holds for those after it (the first one also for those before it), one that is
"about" what holds for the whole file; `shown` there names the cases that belong in the table, if not all do.
Repetitions become one row. Invariant: a number appears with its model, its settings, its count and the commit, and what
a line does not say stays empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from swiftlet_mlx.units import size

from .report import ResultsError

Line = Mapping[str, Any]
DECODE = ("machine", "model", "experts in memory", "decode tok/s (80 % of tokens)", "hits", "read", "waiting",
          "times resident", "times the larger of reads and compute", "n", "date, commit, settings")  # fmt: skip
PREFILL = ("machine", "model", "case", "tokens", "seconds", "prefill tok/s", "n", "read", "date, commit, settings")
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
            rows += [cells for same in _repetitions(path) if (cells := row(path.name[:10], *same))]
        if rows:
            parts.append("\n".join(_markdown(cells) for cells in (columns, ["---"] * len(columns), *rows)) + "\n")
    return "\n".join(parts)


def _repetitions(path: Path) -> list[tuple[Line, list[Line]]]:
    """Lines of the same case, size and settings together, in the order of the first of each."""
    found: dict[str, tuple[Line, list[Line]]] = {}
    for setting, line in _lines(path):
        what = {key: line.get(key, setting.get(key)) for key in ("case", "tokens", "commit", *_SETTINGS)}
        key = json.dumps([what, setting], sort_keys=True)
        found.setdefault(key, (setting, []))[1].append(line)
    return list(found.values())


def _lines(path: Path) -> Iterator[tuple[Line, Line]]:
    """Each line of a file with the settings that hold for it."""
    try:
        found = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
        about: Line = next((line for line in found if line["case"] == "about"), {})
        setting = next(line for line in [*found, about] if line.get("case") in ("setting", "about"))
        shown = {str(case) for case in about.get("shown", ())}
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ResultsError(f"{path}: lines of JSON with a `case`, one of them a setting, were expected") from error
    for line in found:
        if line["case"] == "setting":
            setting = line
        elif line["case"] != "about" and (not shown or str(line["case"]) in shown):
            yield {**about, **setting}, line


def _decode(date: str, setting: Line, lines: list[Line]) -> list[str] | None:
    line = lines[-1]  # each has its own count and range
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


def _prefill(date: str, setting: Line, lines: list[Line]) -> list[str] | None:
    line = lines[0]
    if "tokens" not in line or line["case"] == "ratio" or str(line["case"]).startswith("gated delta"):
        return None
    speeds = {
        "": [_speed(each) for each in lines],
        "layer by layer": [each.get("layer_major_tokens_per_second") for each in lines],
        "mlx-lm's way": [each.get("mlx_lm_tokens_per_second") for each in lines],
    }
    said = ", ".join(f"{_range(values)} {name}".strip() for name, values in speeds.items() if any(values))
    read = line.get("read_bytes")
    return [
        str(setting.get("machine", "")), str(setting.get("model", "")), str(line["case"]), str(line["tokens"]),
        _range([each.get("seconds") for each in lines], "{:.3g}"), said, str(len(lines)), size(read) if read else "",
        _where(date, setting, line),
    ]  # fmt: skip


def _speed(line: Line) -> float | None:
    seconds = line.get("seconds")
    speed: float | None = line.get("tokens_per_second", line["tokens"] / seconds if seconds else None)
    return speed


def _range(values: Iterable[float | None], how: str = "{:.4g}") -> str:
    """The median, and lowest and highest if there are several."""
    known = sorted(value for value in values if value)
    if len(known) < 2:
        return how.format(known[0]) if known else ""
    return f"{how.format(median(known))} ({how.format(known[0])}-{how.format(known[-1])})"


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
