"""`predict`: how fast models would be here, before one is downloaded."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from swiftlet_mlx.cli import console, options

from .shared import gigabytes

EXAMPLE = "Example: python -m swiftlet_bench predict --disk-gb-s 3 --cache-gb 2,8"


def predict(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A model that is here, or a preset.")] = None,
    cache_gb: Annotated[str, typer.Option("--cache-gb", metavar="GB,GB", help="Budgets for experts.")] = "1,2,4,8,16",
    disk_gb_s: Annotated[
        float | None, typer.Option("--disk-gb-s", min=0.001, help="What the disk gives; default: measured here.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where to measure the disk.")] = Path(),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict decoding speed by the size of the cache, with the formula and its terms."""
    from dataclasses import asdict

    from swiftlet_bench import io, predict, rates, shapes, show
    from swiftlet_mlx.errors import OptionError
    from swiftlet_mlx.locate import find_model

    budgets = [round(gb * 1e9) for gb in gigabytes(cache_gb)]
    if not budgets:
        raise OptionError("--cache-gb: give sizes in GB, for example 2,8")
    if model is None:
        wanted = [predict.shape_of(n, shapes.preset(n)) for n in shapes.RELEASED]
    elif model in shapes.PRESETS:
        wanted = [predict.shape_of(model, shapes.preset(model))]
    else:
        wanted = [predict.shape_here(find_model(model))]
    if disk_gb_s is None:
        with io.sample_file(folder, 10**9) as path, console.steps(quiet) as progress:
            sizes = sorted({shape.expert_bytes for shape in wanted})
            results = io.measure(path, sizes=sizes, threads=(4, 8), states=(True,), progress=progress)
        disk = {n: io.bandwidth(results, n) for n in sizes}
    else:
        disk = {shape.expert_bytes: disk_gb_s * 1e9 for shape in wanted}
    rate = rates.measure()
    found = {
        shape: [
            predict.predict(shape, n, rate, disk[shape.expert_bytes])
            for n in budgets
            if n < shape.all_experts_bytes or n == min(budgets)
        ]
        for shape in wanted
    }
    if json:
        report = {
            "formula": predict.FORMULA,
            "weight_bytes_per_second": rate.weights,
            "read_back_seconds": rate.read_back,
            "models": [
                {
                    **asdict(shape),
                    "disk_bytes_per_second": disk[shape.expert_bytes],
                    "predictions": [{**asdict(p), "tokens_per_second": p.tokens_per_second} for p in predictions],
                }
                for shape, predictions in found.items()
            ],
        }
        console.write(jsonlib.dumps(report) + "\n")
        return
    out = show.stdout()
    for shape, predictions in found.items():
        show.predictions(out, shape, predictions, {})
    out.print(
        f"{predict.FORMULA}\nweights {rate.weights / 1e9:.2f} GB/s (4-bit), read-back {show.seconds(rate.read_back)}, "
        f"disk {', '.join(f'{d / 1e9:.2f} GB/s' for d in disk.values())}. Hit rates are those of public measurements; "
        "reads are taken as not hidden by anything",
        markup=False,
    )
