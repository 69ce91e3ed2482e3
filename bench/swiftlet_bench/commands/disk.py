"""`io`: what this disk gives, without a model."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swiftlet_mlx.cli import console, options

EXAMPLE = "Example: python -m swiftlet_bench io --folder . --gb 1"


def io(
    folder: Annotated[Path, typer.Option("--folder", help="Where models are, or will be: measure that disk.")] = Path(),
    file: Annotated[Path | None, typer.Option("--file", help="Read this large file instead of making one.")] = None,
    gb: Annotated[float, typer.Option("--gb", min=0.02, max=64, help="Size of the file that is made.")] = 2.0,
    read_bytes: Annotated[str | None, typer.Option("--read-bytes", metavar="N,N", help="Sizes of one read.")] = None,
    threads: Annotated[str, typer.Option("--threads", metavar="N,N", help="Threads that read at once.")] = "1,4,8,16",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Of all cases, in turn.")] = 3,
    warm: Annotated[bool, typer.Option("--warm/--no-warm", help="Also read from the page cache.")] = True,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure reads at random places of a file by their size and number: what streaming could get at most here."""
    from contextlib import nullcontext

    from swiftlet_bench import io as bench_io
    from swiftlet_bench import machine, show
    from swiftlet_mlx.errors import OptionError

    try:
        sizes = [int(n) for n in read_bytes.split(",")] if read_bytes else list(bench_io.SIZES)
        counts = [int(n) for n in threads.split(",")]
    except ValueError:
        raise OptionError("--read-bytes and --threads take whole numbers, for example 262144,1769472") from None
    if min(*sizes, *counts) < 1 or max(counts) > 256:
        raise OptionError("--read-bytes and --threads must be 1 or more, and at most 256 threads")
    made = nullcontext(file) if file else bench_io.sample_file(folder, max(round(gb * 1e9), 4 * max(sizes)))
    with made as path, console.steps(quiet) as progress:
        results = bench_io.measure(
            path, sizes=sizes, threads=counts, rounds=rounds, states=(True, False) if warm else (True,),
            progress=progress,
        )  # fmt: skip
    if json:
        found = [
            {
                **asdict(r.case),
                **{k: asdict(r)[k]["values"] for k in ("bytes_per_second", "median_seconds", "p99_seconds")},
            }
            for r in results
        ]
        console.write(jsonlib.dumps({"machine": asdict(machine.machine()), "cases": found}) + "\n")
    else:
        out = show.stdout()
        out.print(str(machine.machine()), markup=False)
        show.disk(out, results)
