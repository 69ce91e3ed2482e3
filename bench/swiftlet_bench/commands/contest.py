"""`compare`: engines side by side on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swiftlet_mlx.cli import console, options
from swiftlet_mlx.cli.bench import Csv, Rounds, keep

from .shared import Cold, Generated, PromptLength, gigabytes

EXAMPLE = "Example: python -m swiftlet_bench compare demo --cache-gb 0.002,0.005 --rounds 1"


def compare(
    model: options.Model,
    cache_gb: Annotated[
        str, typer.Option("--cache-gb", metavar="GB,GB", help="This project's budgets, one case each.")
    ] = "",
    source: Annotated[
        Path | None, typer.Option("--source", help="The same model as MLX checkpoint: stock mlx-lm, all in memory.")
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="[NAME=]URL", help="A server with OpenAI's API: http://HOST:PORT/v1."),
    ] = None,
    url_model: Annotated[str | None, typer.Option("--url-model", help="Model to ask the servers for.")] = None,
    program: Annotated[
        list[str] | None,
        typer.Option(
            "--program", metavar="NAME=COMMAND",
            help="A program that prints JSON; {model} {ids} {text} {tokens} are replaced. Repeatable.",
        ),
    ] = None,
    prompt_tokens: PromptLength = 64,
    max_tokens: Generated = 64,
    rounds: Rounds = 3,
    cold: Cold = False,
    csv: Csv = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Measure engines in turn, A B A B, and give the ratios of the same rounds."""
    from dataclasses import asdict

    from swiftlet_bench import compare, report, show
    from swiftlet_bench.endpoint import Endpoint
    from swiftlet_mlx.errors import OptionError
    from swiftlet_mlx.locate import find_model

    def named(text: str, kind: str) -> tuple[str, str]:
        name, equals, rest = text.partition("=")
        if equals and "/" not in name:
            return name, rest
        if kind == "url":
            return text, text
        raise OptionError(f"--{kind} {text!r}: write NAME=COMMAND")

    budgets = gigabytes(cache_gb)
    servers = {n: Endpoint(u, url_model) for n, u in (named(t, "url") for t in url or ())}
    with console.steps(quiet) as progress:
        found = compare.measure(
            find_model(model),
            cache_gb=budgets,
            source=find_model(source) if source else None,
            urls=servers,
            programs=dict(named(t, "program") for t in program or ()),
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            rounds=rounds,
            cold=cold,
            progress=progress,
        )
    if json:
        ratios = {name: asdict(spread)["values"] for name, spread in found.ratios.items()}
        console.write(report.to_json(found.rows, ratios=ratios, same_output=found.same_output) + "\n")
    else:
        out = show.stdout()
        show.heading(out, found.rows[0].setting, "compare, first engine")
        show.compared(out, found)
    keep(found.rows, csv, quiet)
