"""Tables for the terminal. Knows rich and the names of quantities; measures nothing.

Invariant: a median never appears without its spread, nor random weights without saying so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from swiftlet_mlx.units import size

from . import io, predict
from .compare import Compared
from .harness import Setting, Spread
from .report import SYNTHETIC, Row


def stdout() -> Console:
    """Where results go: as wide as the terminal, or wide enough for every table in a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 150)


def heading(console: Console, setting: Setting, what: str) -> None:
    """What was measured, on what, how."""
    synthetic = f" - {SYNTHETIC}" if setting.synthetic else ""
    gib = f"{setting.memory_bytes / 2**30:.0f} GiB"
    _line(console, f"{what}: {setting.model}{synthetic}")
    _line(console, f"{setting.chip}, {gib}, {setting.system}, {setting.backend} ({setting.device})")
    _line(console, f"{setting.versions}, commit {setting.commit}")
    pool = f"{size(setting.cache_bytes)} of experts in memory" if setting.cache_bytes else "every expert in memory"
    _line(console, f"{pool}, page cache {setting.page_cache}, {setting.warm_up} warm-up and {setting.n} counted rounds")


def cases(console: Console, rows: Sequence[Row]) -> None:
    """One line a case."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("tok/s", "low-high", "first token", "hits", "read", "waiting", "CPU", "peak memory"):
        table.add_column(name, justify="right")
    for row in rows:
        v = row.values
        decode = "decode_tokens_per_second" in v
        speed = v["decode_tokens_per_second" if decode else "prefill_tokens_per_second"]
        read = v["read_bytes_per_token" if decode else "prefill_read_bytes"].median
        wait = v["wait_seconds_per_token" if decode else "prefill_wait_seconds"].median
        streamed = bool(row.setting.cache_bytes)
        table.add_row(
            row.case,
            _few(speed.median),
            f"{_few(speed.low)}-{_few(speed.high)}",
            seconds(row["ttft_seconds"]),
            f"{v['hit_rate'].median:.1%}" if decode and streamed else "",
            (size(read) + ("/token" if decode else "")) if streamed else "",
            (seconds(wait) + ("/token" if decode else "")) if streamed else "",
            seconds(row["cpu_seconds"]),
            size(row["peak_bytes"]),
        )
    console.print(table)
    for row in rows:
        for flag in row.flags:
            _line(console, f"{row.case}: {flag}", "yellow")


def compared(console: Console, found: Compared) -> None:
    """One line an engine, with its speed against the first one's in the same rounds."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in (
        "decode tok/s",
        "low-high",
        "times the first",
        "prefill tok/s",
        "first token",
        "peak memory",
        "tokens in/out",
        "output",
    ):
        table.add_column(name, justify="right")
    for row in found.rows:
        v = row.values
        speed, times = v.get("decode_tokens_per_second"), found.ratios.get(row.case)
        same = found.same_output.get(row.case)
        table.add_row(
            row.case,
            _few(speed.median) if speed else "",
            f"{_few(speed.low)}-{_few(speed.high)}" if speed else "",
            f"{times.median:.2f} ({times.low:.2f}-{times.high:.2f})" if times else "",
            _few(v["prefill_tokens_per_second"].median) if "prefill_tokens_per_second" in v else "",
            seconds(v["ttft_seconds"].median) if "ttft_seconds" in v else "",
            size(v["peak_bytes"].median) if "peak_bytes" in v else "",
            f"{row.setting.prompt_tokens}/{v['generated_tokens'].low:.0f}" if "generated_tokens" in v else "",
            "" if same is None else "the same" if same else "DIFFERENT",
        )
    console.print(table)
    for row in found.rows:
        for flag in row.flags:
            _line(console, f"{row.case}: {flag}", "yellow")


def details(console: Console, row: Row) -> None:
    """What the table of cases has no room for."""
    v = row.values
    _line(
        console,
        f"load {seconds(row['load_seconds'])}, peak while loading {size(row['load_peak_bytes'])}; "
        f"MLX active {size(row['mlx_active_bytes'])}, peak {size(row['mlx_peak_bytes'])}",
    )
    if "first_tokens_per_second" in v:
        _line(
            console,
            f"first tokens {_few(row['first_tokens_per_second'])} tok/s, later {_few(row['later_tokens_per_second'])}; "
            f"a token took at most {seconds(row['slowest_token_seconds'])}, 95 % at most "
            f"{seconds(row['p95_token_seconds'])}; {_few(row['read_backs_per_token'])} read-backs, "
            f"{_few(row['reads_per_token'])} reads, {_few(row['evictions_per_token'])} evictions a token",
        )


def disk(console: Console, results: Sequence[io.Result]) -> None:
    """Bandwidth by read size and threads, cold and warm apart."""
    for cold in (True, False):
        part = [r for r in results if r.case.cold == cold]
        if not part:
            continue
        threads = sorted({r.case.threads for r in part})
        title = "from the disk" if cold else "from the page cache"
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        table.add_column("one read")
        for n in threads:
            table.add_column(f"{n} thread{'s' if n > 1 else ''}", justify="right")
        for nbytes in sorted({r.case.read_bytes for r in part}):
            found = {r.case.threads: r for r in part if r.case.read_bytes == nbytes}
            table.add_row(size(nbytes), *(_rate(found[n].bytes_per_second) for n in threads))
        console.print(table)
    noisy = sum(bool(r.bytes_per_second.flags()) for r in results)
    if noisy:
        _line(console, f"{noisy} of {len(results)} cases are noisy; the ranges show how much", "yellow")


def predictions(
    console: Console, shape: predict.Shape, found: Sequence[predict.Prediction], measured: Mapping[int, Spread]
) -> None:
    """Expected speed for several caches, with the terms, and beside it what was measured."""
    table = Table(box=None, pad_edge=False, title=shape.name, title_justify="left")
    for name in ("experts in memory", "hits", "compute", "host", "reads", "expected"):
        table.add_column(name, justify="right")
    if measured:
        table.add_column("measured", justify="right")
    for p in found:
        cells = [
            size(p.cache_bytes), f"{p.hit_rate:.0%}{' assumed' * p.assumed}",
            seconds(p.compute_seconds), seconds(p.host_seconds),
            f"{seconds(p.read_seconds)} ({size(p.read_bytes)})", f"{_few(p.tokens_per_second)} tok/s",
        ]  # fmt: skip
        if measured:
            m = measured.get(p.cache_bytes)
            cells.append(f"{_few(m.median)} tok/s" if m else "")
        table.add_row(*cells)
    console.print(table)


def seconds(value: float) -> str:
    """Seconds as people read them."""
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _rate(spread: Spread) -> str:
    return f"{spread.median / 1e9:.2f} GB/s ({spread.low / 1e9:.2f}-{spread.high / 1e9:.2f})"


def _few(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
