"""Results as people and programs read them: rows, JSON, CSV, a block to paste into an issue, the README's table.

Knows numbers and their names; measures nothing and prints nothing. Invariants: a row carries its setting; numbers of
random weights are marked wherever they appear; a CSV file has one header, and rows that do not fit it are refused.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from swiftlet_mlx.errors import SwiftletError
from swiftlet_mlx.units import size

from . import conditions
from .harness import Setting, Spread

# What is kept of a case, in the order of the columns: median, and lowest and highest beside it.
QUANTITIES = (
    "decode_tokens_per_second", "later_tokens_per_second", "first_tokens_per_second", "prefill_tokens_per_second",
    "ttft_seconds", "hit_rate", "reads_per_token", "read_bytes_per_token", "wait_seconds_per_token",
    "read_backs_per_token", "evictions_per_token", "allocated_bytes_per_token", "p95_token_seconds",
    "slowest_token_seconds", "prefill_read_bytes",
    "prefill_reads", "prefill_wait_seconds", "peak_bytes", "mlx_peak_bytes", "mlx_active_bytes", "cpu_seconds",
    "swap_written_bytes", "throttled", "others_cpu_share", "load_seconds", "load_peak_bytes", "generated_tokens",
)  # fmt: skip
SETTINGS = tuple(f.name for f in fields(Setting))
COLUMNS = ("date", "case", *SETTINGS, "flags", *(f"{q}{end}" for q in QUANTITIES for end in ("", "_low", "_high")))
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
SYNTHETIC = "synthetic (random weights)"
_SAME = ("machine", "model", "engine", "cache_bytes", "page_cache")


class ResultsError(SwiftletError):
    """A file of results, or the place for a table, is not as it must be."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case as measured."""

    case: str
    setting: Setting
    values: Mapping[str, Spread]
    date: str

    @property
    def flags(self) -> list[str]:
        """What a reader must know: of the quantity that matters most, and of the machine meanwhile."""
        around = conditions.flags({name: spread.values for name, spread in self.values.items()})
        for name in ("decode_tokens_per_second", "prefill_tokens_per_second", "ttft_seconds"):
            if name in self.values:
                return [*self.values[name].flags(), *around]
        return around

    def __getitem__(self, name: str) -> float:
        return self.values[name].median


def today() -> str:
    """The date of a result."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def flat(row: Row) -> dict[str, Any]:
    """A row as one level of names, as in the CSV file. Quantities without a value are left out."""
    out: dict[str, Any] = {"date": row.date, "case": row.case, **asdict(row.setting), "flags": "; ".join(row.flags)}
    for name in QUANTITIES:
        if name in row.values:
            spread = row.values[name]
            out |= {name: _short(spread.median), f"{name}_low": _short(spread.low), f"{name}_high": _short(spread.high)}
    return out


def to_json(rows: Sequence[Row], **more: Any) -> str:
    """One object: the settings that all rows share, then each case with medians and [low, high]."""
    shared = _shared([row.setting for row in rows])
    cases = []
    for row in rows:
        own = {k: v for k, v in asdict(row.setting).items() if k not in shared}
        spreads = {k: v for k, v in row.values.items() if k in QUANTITIES}
        cases.append(
            {
                "case": row.case,
                **own,
                **{k: _short(v.median) for k, v in spreads.items()},
                "spread": {k: [_short(v.low), _short(v.high)] for k, v in spreads.items()},
                "flags": row.flags,
            }
        )
    return json.dumps({"date": rows[0].date, **shared, "cases": cases, **more}, ensure_ascii=False)


def append_csv(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file of results, which is begun if it is not there.

    Raises:
        ResultsError: the file has other columns.
    """
    if path.exists() and path.stat().st_size:
        with open(path, newline="") as file:
            found = next(csv.reader(file))
        if tuple(found) != COLUMNS:
            raise ResultsError(
                f"{path}: its columns are not those of this version, so new rows would be misread. "
                "Give another file, or move this one away"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.exists() and path.stat().st_size > 0
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not begun:
            writer.writeheader()
        for row in rows:
            writer.writerow(flat(row))


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file of results.

    Raises:
        ResultsError: it is not one.
    """
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ResultsError(f"{path}: not a file of results of this version")
        return list(reader)


def share(rows: Sequence[Row]) -> str:
    """A block to paste into an issue: the machine as a type, versions, settings, results. No names, no paths."""
    s = rows[0].setting
    lines = [
        f"swiftlet-mlx bench, {rows[0].date}, commit {s.commit}",
        f"{s.chip}, {s.memory_bytes / 2**30:.0f} GiB, {s.system}, {s.backend}",
        s.versions,
        f"model {_model(s.model, s.synthetic)} ({s.model_hash}), cache {size(s.cache_bytes)}, "
        f"page cache {s.page_cache}, {s.threads} read threads",
    ]
    for row in rows:
        lines.append(f"{row.case:18} {_in_words(row)}")
    return "```\n" + "\n".join(lines) + "\n```\n"


def results_table(folder: Path) -> str:
    """The table of the newest result of each setting in a folder of results, as Markdown.

    Raises:
        ResultsError: a file in the folder is not one of results.
    """
    newest: dict[tuple[str, ...], dict[str, str]] = {}
    prompts: dict[tuple[str, ...], dict[str, str]] = {}  # the longest prompt of the same page
    for path in sorted(folder.glob("*.csv")):
        for row in read_csv(path):
            key = tuple(row[k] for k in _SAME)
            if not row["decode_tokens_per_second"]:
                page = (*key, row["date"], row["commit"])
                if page not in prompts or int(row["prompt_tokens"]) > int(prompts[page]["prompt_tokens"]):
                    prompts[page] = row
            elif key not in newest or row["date"] >= newest[key]["date"]:
                newest[key] = row
    head = (
        "| machine | model | engine | experts in memory | page cache | decode tok/s | prefill tok/s | hit rate "
        "| peak memory | date, commit |\n|---|---|---|---|---|---|---|---|---|---|\n"
    )
    ordered = sorted(newest.items(), key=lambda item: (*item[0][:3], int(item[1]["cache_bytes"]), item[0]))
    return head + "".join(_line(row, prompts.get((*key, row["date"], row["commit"]), row)) for key, row in ordered)


def put_between_markers(text: str, table: str, name: str = "results") -> str:
    """A document with the table in its place.

    Args:
        text: The document.
        table: Lines of Markdown.
        name: Of the markers.

    Raises:
        ResultsError: the document does not have both markers of that name once, in order.
    """
    begin, end = BEGIN.format(name), END.format(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ResultsError(f"the document needs the lines {begin} and {end} once, in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}{end}{rest.split(end)[1]}"


def _line(row: Mapping[str, str], prompt: Mapping[str, str]) -> str:
    cache = int(row["cache_bytes"])
    where = row["device"] if row["backend"] == "cuda" else row["chip"]
    spread = f"{_number(row, 'decode_tokens_per_second')} ({_range(row, 'decode_tokens_per_second')})"
    remarks = [flag.partition(":")[0] for flag in row["flags"].split("; ") if flag]
    cells = (
        f"{where}, {int(row['memory_bytes']) / 2**30:.0f} GiB, {row['backend']}",
        _model(row["model"], row["synthetic"] == "True"),
        row["engine"],
        size(cache) if cache else "all",
        row["page_cache"],
        ", ".join([spread, *remarks]),
        f"{_number(prompt, 'prefill_tokens_per_second')} at {prompt['prompt_tokens']}",
        f"{float(row['hit_rate']):.1%}" if row["hit_rate"] and cache else "-",
        size(float(row["peak_bytes"])),
        f"{row['date']}, {row['commit']}",
    )
    return "| " + " | ".join(cells) + " |\n"


def _model(name: str, synthetic: bool) -> str:
    return f"{name}, {SYNTHETIC}" if synthetic else name


def _number(row: Mapping[str, str], name: str) -> str:
    return f"{float(row[name]):.3g}" if row[name] else "-"


def _range(row: Mapping[str, str], name: str) -> str:
    return f"{float(row[name + '_low']):.3g}-{float(row[name + '_high']):.3g}"


def _in_words(row: Row) -> str:
    v, parts = row.values, []
    if "decode_tokens_per_second" in v:
        d = v["decode_tokens_per_second"]
        parts.append(f"{d.median:.2f} tok/s ({d.low:.2f}-{d.high:.2f}, n={d.n})")
    else:
        p = v["prefill_tokens_per_second"]
        parts.append(f"{p.median:.1f} tok/s ({p.low:.1f}-{p.high:.1f}, n={p.n})")
        parts.append(f"first token {row['ttft_seconds']:.2f} s, read {size(row['prefill_read_bytes'])}")
    if "hit_rate" in v and row.setting.cache_bytes:
        parts.append(f"hits {row['hit_rate']:.1%}, read {size(row['read_bytes_per_token'])} a token")
    parts.append(f"peak {size(row['peak_bytes'])}")
    return ", ".join([*parts, *row.flags])


def _shared(settings: Sequence[Setting]) -> dict[str, Any]:
    first = asdict(settings[0])
    return {k: v for k, v in first.items() if all(asdict(s)[k] == v for s in settings)}


def _short(value: float) -> float | int:
    """Six digits are more than any of these is worth."""
    rounded = float(f"{value:.6g}")
    return int(value) if value == int(value) else rounded
