"""`chat`: turns as arguments, or a conversation at the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from . import console, options
from .generate import figures
from .running import engine_for

EXAMPLE = 'Example: swiftlet-mlx chat demo "What is the capital of Spain?" "And what about France?"'


def chat(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Container, checkpoint folder or name.")] = "demo",
    turns: Annotated[list[str] | None, typer.Argument(metavar="[TURN]...", help="Answer these and exit.")] = None,
    system: options.System = None,
    thinking: options.Thinking = None,
    max_tokens: options.MaxTokens = None,
    cache_gb: options.CacheGb = None,
    temp: options.Temp = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Talk to a model. With TURNs, answer each and exit; without, read lines until end of file."""
    from swiftlet_mlx.completion import Ask, Completions
    from swiftlet_mlx.events import TextDelta
    from swiftlet_mlx.session import Session

    values = options.sampling_values(
        temp=temp, top_p=top_p, top_k=top_k, min_p=min_p, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, seed=seed,
    )  # fmt: skip
    with engine_for(model, cache_gb=cache_gb, trust_remote_code=trust_remote_code, quiet=quiet) as (engine, folder):
        completions = Completions(engine, folder)
        sampling = completions.defaults(thinking=bool(thinking)).with_values(**values)
        ask = Ask(sampling=sampling, max_tokens=max_tokens, thinking=thinking)
        session = Session(completions, system=system, ask=ask)
        for text in turns or _lines():
            turn = session.send(text)
            try:
                for event in turn:
                    if isinstance(event, TextDelta):
                        console.write(event.text)
            except KeyboardInterrupt:
                turn.close()
                console.say("\nstopped; what was said so far is kept")
                continue
            console.write("\n")
            if not quiet and turn.statistics is not None:
                console.say(figures(engine, turn.statistics))


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line:
            yield line
