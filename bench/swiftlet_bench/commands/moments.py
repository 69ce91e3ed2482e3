"""`timeline`: where the time of one token goes, moment by moment."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from typing import Annotated

import typer

from swiftlet_mlx.cli import console, options
from swiftlet_mlx.cli.bench import Plot, Threads
from swiftlet_mlx.cli.left_open import cache_gb_for, io_for

EXAMPLE = "Example: python -m swiftlet_bench timeline demo --cache-gb 0.001"


def timeline(
    model: options.Model,
    cache_gb: options.CacheGb = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=11, help="Tokens to choose the typical one from.")
    ] = 32,
    threads: Threads = 8,
    io: options.Io = "auto",
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Decode, and show the typical token: evaluating, waiting for reads, host work, and the reads beside them."""
    from swiftlet_bench import show, timeline
    from swiftlet_bench.subject import opened
    from swiftlet_mlx.locate import find_model

    folder = find_model(model)
    with opened(folder, cache_gb=cache_gb_for(folder, cache_gb), threads=threads, io=io_for(io)) as subject:
        subject.run(subject.prompt(32, 1), 4)  # compiles kernels
        found = timeline.measure(subject, n_tokens=max_tokens)
        setting = subject.setting(subject.prompt(32), max_tokens, 1, 1)
    sums = {
        "evaluating": found.total("evaluate"),
        "waiting for reads": found.total("wait"),
        "host work and the rest": found.host_seconds,
        "reads, all threads": found.total("read"),
    }
    if json:
        console.write(jsonlib.dumps({"setting": asdict(setting), **asdict(found), "sums": sums}) + "\n")
    else:
        out = show.stdout()
        show.heading(out, setting, "timeline of one token")
        out.print(f"{show.seconds(found.seconds)}: " + ", ".join(f"{k} {show.seconds(v)}" for k, v in sums.items()))
    if plot is not None:
        from swiftlet_bench import plot as pictures

        pictures.timeline(setting, found, plot)
