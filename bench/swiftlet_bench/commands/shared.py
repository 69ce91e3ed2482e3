"""Options that the comparing commands share, each spelled and explained once."""

from __future__ import annotations

from typing import Annotated

import typer

PromptLength = Annotated[int, typer.Option("--prompt-tokens", min=2, help="Length of the prompts.")]
Generated = Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens to generate.")]
Cold = Annotated[bool, typer.Option("--cold", help="Empty the page cache before each run (Linux).")]


def gigabytes(text: str) -> list[float]:
    """The sizes of a `--cache-gb`: `0.5,2` as numbers.

    Raises:
        OptionError: if it is anything else.
    """
    from swiftlet_mlx.errors import OptionError

    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise OptionError(f"--cache-gb {text!r}: give sizes in GB, for example 0.5,2") from None
