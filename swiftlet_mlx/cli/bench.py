"""`bench`: what a model does on this machine, on one page. The measuring is swiftlet_bench's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, options

if TYPE_CHECKING:
    from swiftlet_bench.report import Row

    from swiftlet_mlx.reader import IO

EXAMPLE = "Example: swiftlet-mlx bench demo --prompt-tokens 64 --max-tokens 32"

PromptTokens = Annotated[str, typer.Option("--prompt-tokens", metavar="N,N", help="Prompt lengths to read.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Counted rounds; three or more show the spread.")]
WarmUp = Annotated[int, typer.Option("--warm-up", min=0, help="Rounds before, that do not count.")]
Threads = Annotated[int, typer.Option("--threads", min=1, max=64, help="Threads that read experts.")]
Io = Annotated[str, typer.Option("--io", help="cached: experts may stay in the page cache; direct: they do not.")]
Csv = Annotated[
    Path | None, typer.Option("--csv", metavar="PATH", help="Append to this file, or to MACHINE.csv in this folder.")
]
Share = Annotated[bool, typer.Option("--share", help="Print a block to paste into an issue; no personal data.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result into a PNG or SVG (needs matplotlib).")
]


def bench(
    model: options.Model = "demo",
    cache_gb: options.CacheGb = None,
    prompt_tokens: PromptTokens = "128,512,2048",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens to generate in a decode run.")] = 64,
    rounds: Rounds = 3,
    warm_up: WarmUp = 1,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the page cache before every run (Linux).")] = False,
    stock: Annotated[bool, typer.Option("--stock", help="Measure mlx-lm alone, every expert in memory.")] = False,
    threads: Threads = 8,
    io: Io = "cached",
    predict: Annotated[bool, typer.Option("--predict", help="Also predict, and compare.")] = False,
    csv: Csv = None,
    share: Share = False,
    plot: Plot = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure decode and prefill speed, time to first token, memory and reads of a model on this machine."""
    from swiftlet_bench import page, report, show

    from swiftlet_mlx.locate import find_model

    folder = find_model(model)
    plan = page.Plan(lengths(prompt_tokens), max_tokens, rounds, warm_up, cold)
    remark = (lambda text: None) if quiet else console.warn
    with console.steps(quiet) as progress:
        rows, sizes = page.measure(
            folder,
            plan,
            cache_gb=cache_gb,
            threads=threads,
            io=io_choice(io),
            stock=stock,
            progress=progress,
            warn=remark,
        )
    if json:
        console.write(report.to_json(rows, sizes=sizes) + "\n")
    elif share:
        console.write(report.share(rows))
    else:
        out = show.stdout()
        show.heading(out, rows[0].setting, "bench")
        show.cases(out, rows)
        show.details(out, rows[0])
    if predict and not json and not share:
        compare_with_prediction(folder, rows, quiet)
    keep(rows, csv, quiet)
    if plot is not None:
        from swiftlet_bench import plot as pictures

        pictures.page(rows, plot)


def lengths(text: str) -> tuple[int, ...]:
    """`128,512` as numbers.

    Raises:
        OptionError: if it is anything else.
    """
    from swiftlet_mlx.errors import OptionError

    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or min(found) < 2:
        raise OptionError(f"--prompt-tokens {text!r}: give lengths of 2 tokens or more, for example 128,512")
    return found


def io_choice(text: str) -> IO:
    """`cached` or `direct`.

    Raises:
        OptionError: if it is anything else.
    """
    from swiftlet_mlx.errors import OptionError

    if text not in ("cached", "direct"):
        raise OptionError(f"--io {text!r}: it can be cached or direct")
    return "cached" if text == "cached" else "direct"


def keep(rows: list[Row], csv: Path | None, quiet: bool) -> None:
    """Append rows to a file of results, if one was asked for."""
    from swiftlet_bench import report

    if csv is None:
        return
    path = csv / f"{rows[0].setting.machine}.csv" if csv.is_dir() else csv
    report.append_csv(path, rows)
    if not quiet:
        console.say(f"added {len(rows)} rows to {path}")


def compare_with_prediction(folder: Path, rows: list[Row], quiet: bool) -> None:
    """Predict what was just measured, from this disk and this device, and show both."""
    import mlx.core as mx
    from swiftlet_bench import io, predict, rates, show

    setting = rows[0].setting
    shape = predict.shape_here(folder)
    bits, tag = predict.width_here(folder)
    types: dict[str, Any] = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
    largest = max((p for p in folder.rglob("*.bin")), key=lambda p: p.stat().st_size, default=None)
    largest = largest or max(folder.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    cold = setting.page_cache == "cold"
    with console.steps(quiet) as progress:
        disk = io.measure(largest, sizes=(shape.expert_bytes,), threads=(1, 4, 8), states=(cold,), progress=progress)
    rate = rates.measure(bits, types.get(tag, mx.float32))
    found = predict.predict(shape, setting.cache_bytes, rate, io.bandwidth(disk, shape.expert_bytes, cold))
    show.predictions(show.stdout(), shape, [found], {setting.cache_bytes: rows[0].values["decode_tokens_per_second"]})
    console.write(f"{predict.FORMULA}\nhit rates are assumed (measured ones: cache-curve); reads are not hidden\n")
