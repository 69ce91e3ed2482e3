"""`bench`: what a model does on this machine, on one page. The measuring is swiftlet_bench's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import console, options
from .left_open import cache_gb_for, io_for

if TYPE_CHECKING:
    from swiftlet_bench.forecast import Here
    from swiftlet_bench.predict import Prediction
    from swiftlet_bench.report import Row

EXAMPLE = "Example: swiftlet-mlx bench demo --prompt-tokens 64 --max-tokens 32"

PromptTokens = Annotated[str, typer.Option("--prompt-tokens", metavar="N,N", help="Prompt lengths to read.")]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, metavar="N", help="Counted rounds; three or more show the spread.")
]
WarmUp = Annotated[int, typer.Option("--warm-up", min=0, metavar="N", help="Rounds before, that do not count.")]
Threads = Annotated[int, typer.Option("--threads", min=1, max=64, metavar="N", help="Threads that read experts.")]
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
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, metavar="N", help="Tokens to generate in a decode run.")
    ] = 64,
    rounds: Rounds = 3,
    warm_up: WarmUp = 1,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the page cache before every run (Linux).")] = False,
    stock: Annotated[bool, typer.Option("--stock", help="Measure mlx-lm alone, every expert in memory.")] = False,
    threads: Threads = 8,
    io: options.Io = "auto",
    predict: Annotated[bool, typer.Option("--predict", help="Also predict, and compare.")] = False,
    csv: Csv = None,
    share: Share = False,
    plot: Plot = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a model's speed, memory and reads on this machine.

    Decode and prefill speed, time to first token, peak memory, hit rate and bytes read.
    """
    from swiftlet_bench import page, report, show

    from swiftlet_mlx.locate import find_model

    folder = find_model(model)
    plan = page.Plan(fitting(lengths(prompt_tokens), folder), max_tokens, rounds, warm_up, cold)
    if csv is not None:
        check_place(csv)  # not after minutes of measuring
    if plot is not None:
        from swiftlet_bench import plot as pictures

        pictures.check(plot)
    remark = (lambda text: None) if quiet else console.warn
    with console.steps(quiet) as progress:
        rows, sizes = page.measure(
            folder,
            plan,
            cache_gb=cache_gb_for(folder, cache_gb),
            threads=threads,
            io=io_for(io),
            stock=stock,
            progress=progress,
            warn=remark,
        )
    expected = predictions(folder, rows[0], quiet) if predict else None
    if json:
        more = {"prediction": expected[0].report(expected[1])} if expected else {}
        console.write(report.to_json(rows, sizes=sizes, **more) + "\n")
    elif share:
        console.write(report.share(rows))
    else:
        out = show.stdout()
        show.heading(out, rows[0].setting, "bench")
        show.cases(out, rows)
        show.details(out, rows[0])
        if expected:
            measured = {expected[1][0].cache_bytes: rows[0].values["decode_tokens_per_second"]}
            show.predictions(out, expected[0].shape, expected[1], measured)
            console.write(f"{expected[0].in_words()}; reads are taken as not hidden\n")
    keep(rows, csv, quiet)
    if plot is not None:
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


def fitting(found: tuple[int, ...], folder: Path) -> tuple[int, ...]:
    """The lengths, if the model's context holds the longest.

    Raises:
        OptionError: it does not.
    """
    from swiftlet_mlx.config import ModelConfig, read_config
    from swiftlet_mlx.errors import OptionError

    context = ModelConfig.from_dict(read_config(folder), str(folder)).context
    if context is not None and max(found) >= context:
        raise OptionError(f"--prompt-tokens {max(found)}: this model's context holds {context} tokens; give fewer")
    return found


def check_place(csv: Path) -> None:
    """Refuse a file of results that could not be appended to.

    Raises:
        OptionError: it, or the folder it is to be in, cannot be written to.
    """
    from swiftlet_mlx.errors import OptionError

    there = next(p for p in (csv, *csv.absolute().parents) if p.exists())
    if not os.access(there, os.W_OK):
        raise OptionError(f"--csv {csv}: {there} cannot be written to; choose another place")


def keep(rows: list[Row], csv: Path | None, quiet: bool) -> None:
    """Append rows to a file of results, if one was asked for."""
    from swiftlet_bench import report

    if csv is None:
        return
    path = csv / f"{rows[0].setting.machine}.csv" if csv.is_dir() else csv
    report.append_csv(path, rows)
    if not quiet:
        console.say(f"added {len(rows)} rows to {path}")


def predictions(folder: Path, row: Row, quiet: bool) -> tuple[Here, list[Prediction]]:
    """What this disk and this device let one expect of what was just measured: with the hit rate of other models, and
    with its own, which leaves the formula to be judged."""
    from swiftlet_bench import forecast

    setting = row.setting
    with console.steps(quiet) as progress:
        here = forecast.measure(folder, cold=setting.page_cache == "cold", progress=progress)
    cache = setting.cache_bytes or here.shape.all_experts_bytes
    return here, [here.at(cache), here.at(cache, row["hit_rate"])]
