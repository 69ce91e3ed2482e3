"""`info`: what a model is, what it costs in memory here, what it reads a token. Loads no weights."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, left_open, options

if TYPE_CHECKING:
    from swiftlet_bench.forecast import Here
    from swiftlet_bench.predict import Prediction

EXAMPLE = "Example: swiftlet-mlx info demo --predict"
SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)  # of all experts, that speeds are predicted for


def info(
    model: options.Model,
    cache_gb: options.CacheGb = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Measure this disk and device, and predict speeds. About ten seconds.")
    ] = False,
    disk_gb_s: Annotated[
        float | None,
        typer.Option(
            "--disk-gb-s",
            min=0.001,
            max=1000,
            metavar="GB/S",
            help="What the disk gives, instead of measuring it.",
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show a model's architecture, its sizes and its memory here."""
    from swiftlet_mlx.locate import find_model

    folder = find_model(model)
    facts = describe(str(folder), cache_gb)
    expected = predictions(folder, facts, disk_gb_s, quiet) if predict or disk_gb_s is not None else None
    if json:
        more = {"prediction": expected[0].report(expected[1])} if expected else {}
        console.write(jsonlib.dumps({**facts, **more}) + "\n")
        return
    for key, value in facts.items():
        if key.endswith("_bytes"):
            key, value = key.removesuffix("_bytes"), console.size(value)
        console.write(f"{key.replace('_', ' '):24} {value}\n")
    if expected:
        from swiftlet_bench import show

        console.write("\n")
        show.predictions(show.stdout(), expected[0].shape, expected[1], {})
        console.write(
            f"{expected[0].in_words()}; hit rates are those of public measurements of other models, "
            "reads are taken as not hidden (`bench --predict` compares with what is measured)\n"
        )


def describe(folder: str, cache_gb: float | None) -> dict[str, Any]:
    """The facts `info` shows. Sizes are bytes."""
    from swiftlet_mlx import memory
    from swiftlet_mlx.config import ModelConfig, read_config
    from swiftlet_mlx.qpack import Container
    from swiftlet_mlx.reader import open_source

    path = Path(folder)
    source, opened = open_source(path)
    source.close()
    raw = read_config(path)
    config = ModelConfig.from_dict(raw, str(path))
    tables = source.tables
    widest = max(tables.values(), key=lambda t: t.payload_bytes)
    plan = memory.plan(opened, tables, raw, left_open.cache_gb_for(path, cache_gb))
    slots = memory.split(tables, plan.pool, config.top_k)
    return {
        "model": path.name,
        "type": config.model_type,
        "kind": f"container v{opened.version}" if isinstance(opened, Container) else "MLX checkpoint (not repacked)",
        "source": source.origin,
        "layers": config.layer_count,
        "layers_with_experts": len(tables),
        "experts_per_layer": widest.expert_count,
        "experts_per_token": config.top_k,
        "context_tokens": config.context,
        "expert_bytes": widest.payload_bytes,
        "all_experts_bytes": opened.expert_bytes,
        "dense_bytes": plan.dense,
        "per_token_bytes": plan.cycle,
        "smallest_cache_bytes": memory.minimum_bytes(tables, config.top_k),
        "available_bytes": plan.available,
        "cache_bytes": sum(n * tables[layer].payload_bytes for layer, n in slots.items()),
        "cache_slots": sum(slots.values()),
        "memory_to_run_bytes": plan.process_total,
        "reads": left_open.io_in_words(),
    }


def predictions(
    folder: Path, facts: dict[str, Any], disk_gb_s: float | None, quiet: bool
) -> tuple[Here, list[Prediction]]:
    """What to expect with the cache a command would use, with what one token touches, and with shares of all experts
    that fit into the memory that is free."""
    from swiftlet_bench import forecast

    with console.steps(quiet) as progress:
        disk = None if disk_gb_s is None else disk_gb_s * 1e9
        here = forecast.measure(folder, disk=disk, progress=progress)
    rest = facts["memory_to_run_bytes"] - facts["cache_bytes"]
    wanted = {facts["per_token_bytes"], *(round(facts["all_experts_bytes"] * share) for share in SHARES)}
    fitting = {n for n in wanted if rest + n <= facts["available_bytes"]}
    return here, [here.at(n) for n in sorted({facts["cache_bytes"], *fitting})]
