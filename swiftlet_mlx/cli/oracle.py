"""`oracle`: layer by layer against stock mlx-lm, also for a model that does not fit."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import console, options

EXAMPLE = "Example: swiftlet-mlx oracle MODEL.qpack --source MLX_CHECKPOINT --max-tokens 32"
DEFAULT_IDS = "1,5,9,42,7,99,3,17,64,2"


def oracle(
    container: options.Model,
    source: Annotated[
        Path, typer.Option("--source", metavar="FOLDER", help="The MLX checkpoint folder it was made from.")
    ],
    ids: Annotated[str, typer.Option("--ids", metavar="1,2,3", help="Prompt as token ids.")] = DEFAULT_IDS,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Tokens to generate.")] = 32,
    cache_gb: options.CacheGb = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare a streamed model with stock mlx-lm, layer by layer.

    Stock mlx-lm runs on the source checkpoint, one layer's experts in memory at a time. Exit code 1 if tokens differ.
    """
    from swiftlet_mlx.locate import find_model
    from swiftlet_mlx.oracle import compare

    folder, origin = find_model(container), find_model(source)
    with console.steps(quiet) as progress:
        found = compare(
            folder, origin, options.token_ids(ids), n_tokens=max_tokens, cache_gb=cache_gb, progress=progress,
            warn=None if quiet else console.warn,
        )  # fmt: skip
    if json:
        console.write(jsonlib.dumps({**asdict(found), "exact": found.exact, "agrees": found.agrees}) + "\n")
    else:
        for layer, difference in enumerate(found.layers):
            console.write(f"layer {layer:3d}  largest difference {difference:.3g}\n")
        console.write(f"logits     largest difference {found.logits:.3g}\n")
        console.write(f"tokens     {','.join(map(str, found.ids))}\n")
    if found.exact and found.agrees:
        verdict = "equal to stock mlx-lm, bit for bit"
    elif found.agrees:
        verdict = "the same greedy tokens as stock mlx-lm; numbers differ in rounding"
    else:
        verdict = f"DIFFERENT from stock mlx-lm from generated token {found.first_difference} on"
    console.say(f"{found.prompt_tokens} prompt tokens and {len(found.ids)} generated: {verdict}")
    if not found.agrees:
        raise typer.Exit(1)
