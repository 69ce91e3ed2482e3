"""`synthetic`: a model of random weights, to try memory and I/O without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swiftlet_mlx.cli import console, options

EXAMPLE = "Example: python -m swiftlet_bench synthetic --preset qwen3.6-35b --layers 4 --output X.qpack"


def synthetic(
    preset: Annotated[str, typer.Option("--preset", help="qwen3-next-80b, qwen3.6-35b, qwen3.5-397b, medium, tiny.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="NAME.qpack, or a folder with --checkpoint.")],
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Fewer layers than the real model.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", min=1, help="Fewer experts a layer.")] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", min=300, help="A smaller vocabulary.")] = None,
    bits: Annotated[str, typer.Option("--bits", help="4, 8 or none.")] = "4",
    group_size: Annotated[int | None, typer.Option("--group-size", help="Of the quantization; 64, or 32.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32, of scales and norms.")] = (
        "bfloat16"
    ),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the weights.")] = 0,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="An MLX checkpoint folder, no container.")] = False,
    tokenizer: Annotated[bool, typer.Option("--tokenizer/--no-tokenizer", help="Add a byte-level one.")] = True,
    quiet: options.Quiet = False,
) -> None:
    """Write a model of random weights in a real model's shape, with a router that has favourites as real ones do."""
    import time

    import mlx.core as mx

    from swiftlet_bench import shapes
    from swiftlet_bench.synthetic import make_checkpoint, make_container
    from swiftlet_mlx.errors import OptionError

    widths = {"4": 4, "8": 8, "none": None}
    types = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
    if bits not in widths or dtype not in types:
        raise OptionError(f"--bits is one of {', '.join(widths)} and --dtype one of {', '.join(types)}")
    config = shapes.preset(preset, layers=layers, experts=experts, vocab=vocab)
    start = time.perf_counter()
    with console.progress(quiet) as progress:
        (make_checkpoint if checkpoint else make_container)(
            output,
            config,
            bits=widths[bits],
            group_size=group_size or (32 if preset == "tiny" else 64),
            dtype=types[dtype],
            seed=seed,
            tokenizer=tokenizer,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    nbytes = sum(p.stat().st_size for p in output.rglob("*") if p.is_file())
    if not quiet:
        console.say(f"{output}: {console.size(nbytes)} of random weights in {seconds:.1f} s (synthetic)")
