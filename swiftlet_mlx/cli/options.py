"""Options that several commands share, each spelled and explained once. Names follow mlx-lm where it has one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swiftlet_mlx.errors import OptionError

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A .qpack container, an MLX checkpoint folder, an installed model, or demo."),
]
CacheGb = Annotated[
    float | None,
    typer.Option(
        "--cache-gb",
        metavar="GB",
        help="Memory for experts, in GB (10^9 bytes). Default: what is free and not needed else, at most all experts.",
    ),
]
Io = Annotated[
    str,
    typer.Option(
        "--io",
        metavar="cached|direct|auto",
        help="Keep what was read in the system's page cache, or not; auto: what doctor found, else cached.",
    ),
]
Warm = Annotated[
    bool, typer.Option("--warm/--no-warm", help="Read the experts you use most at the start, and remember them.")
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest reply, in tokens.")]
Temp = Annotated[float | None, typer.Option("--temp", help="Sampling temperature; 0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens with this much probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 is off.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Drop tokens less likely than this share of the best.")]
PresencePenalty = Annotated[float | None, typer.Option("--presence-penalty", help="Against tokens already used.")]
FrequencyPenalty = Annotated[float | None, typer.Option("--frequency-penalty", help="Against tokens, by use count.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")]
System = Annotated[str | None, typer.Option("--system", help="System prompt.")]
Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Let the model think first, where it can.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no statistics.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
]


def sampling_values(**values: Any) -> dict[str, Any]:
    """The sampling options that were given, under the library's names."""
    names = {"temp": "temperature"}
    return {names.get(k, k): v for k, v in values.items() if v is not None}


def token_ids(text: str) -> list[int]:
    """`1,5,9` as numbers.

    Raises:
        OptionError: if it is anything else.
    """
    try:
        ids = [int(part) for part in text.replace(" ", "").split(",")]
    except ValueError:
        raise OptionError(f"--ids {text!r} is not a list of token ids; write for example --ids 1,5,9") from None
    if any(i < 0 for i in ids):
        raise OptionError(f"--ids {text!r} has a negative id")
    return ids
