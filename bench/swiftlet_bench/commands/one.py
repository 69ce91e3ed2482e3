"""`one`: a single run in this process, as JSON. What the comparing commands start again and again."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swiftlet_mlx.cli import console, options
from swiftlet_mlx.cli.left_open import cache_gb_for, io_for

EXAMPLE = "Example: python -m swiftlet_bench one demo --prompt-tokens 32 --max-tokens 16"


def one(
    model: options.Model,
    cache_gb: options.CacheGb = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompt.")] = 0,
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="Threads that read experts.")] = 8,
    io: options.Io = "auto",
    stock: Annotated[bool, typer.Option("--stock", help="mlx-lm alone, every expert in memory.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the page cache before the run (Linux).")] = False,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="Runs of other prompts before.")] = 0,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="Take the token ids from this JSON list instead.")
    ] = None,
) -> None:
    """Run one prompt and print its values as one JSON object."""
    from swiftlet_bench import pagecache
    from swiftlet_bench.prompts import digest
    from swiftlet_bench.subject import opened
    from swiftlet_mlx.locate import find_model

    folder = find_model(model)
    if cold:
        pagecache.evict(folder)
    with opened(
        folder, cache_gb=cache_gb_for(folder, cache_gb), threads=threads, io=io_for(io), stock=stock
    ) as subject:
        ids = jsonlib.loads(prompt_file.read_text()) if prompt_file else subject.prompt(prompt_tokens, seed)
        for n in range(warm_up):
            subject.run(subject.prompt(len(ids), 10_000 + n), min(4, max_tokens))
        if cold:
            pagecache.evict(folder)
        state = pagecache.state(pagecache.cached_share(folder))
        values = subject.run(ids, max_tokens)
        values |= {"load_seconds": subject.load_seconds, "load_peak_bytes": subject.load_peak_bytes}
        setting = {**asdict(subject.setting(ids, max_tokens, 1, warm_up)), "page_cache": state}
        output = digest(subject.last_ids)
    console.write(jsonlib.dumps({"setting": setting, "values": values, "output": output}) + "\n")
