"""`cache-curve`: speed, hits and memory by the size of the slot pool."""

from __future__ import annotations

from typing import Annotated

import typer

from swiftlet_mlx.cli import console, options
from swiftlet_mlx.cli.bench import Csv, Plot, Rounds, keep

from .shared import Cold, Generated, PromptLength, gigabytes

EXAMPLE = "Example: python -m swiftlet_bench cache-curve demo --rounds 1 --max-tokens 16"


def cache_curve(
    model: options.Model,
    cache_gb: Annotated[
        str | None, typer.Option("--cache-gb", metavar="GB,GB", help="Budgets; default: from the least to everything.")
    ] = None,
    prompt_tokens: PromptLength = 64,
    max_tokens: Generated = 64,
    rounds: Rounds = 3,
    cold: Cold = False,
    csv: Csv = None,
    plot: Plot = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure decoding at several budgets, in turn, each run in a process of its own."""
    from swiftlet_bench import cache_curve, predict, report, show
    from swiftlet_mlx.locate import find_model

    folder = find_model(model)
    given = gigabytes(cache_gb or "")
    with console.steps(quiet) as progress:
        rows = cache_curve.measure(
            folder,
            given or cache_curve.budgets(folder),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            rounds=rounds,
            cold=cold,
            progress=progress,
        )
    if json:
        curve = cache_curve.curve(rows, predict.shape_here(folder).all_experts_bytes)
        console.write(report.to_json(rows, curve=curve) + "\n")
    else:
        out = show.stdout()
        show.heading(out, rows[0].setting, "cache curve, smallest budget")
        show.cases(out, rows)
    keep(rows, csv, quiet)
    if plot is not None:
        from swiftlet_bench import plot as pictures

        pictures.cache_curve(rows, plot)
