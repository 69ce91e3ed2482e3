"""Options that several commands share, each spelled and explained once. Names follow mlx-lm where it has one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say how memory is divided, part by part.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
]


SAMPLING: dict[str, tuple[str, Any]] = {  # option: the library's name for it, and how it is spelled
    "temp": ("temperature", Temp),
    "top_p": ("top_p", TopP),
    "top_k": ("top_k", TopK),
    "min_p": ("min_p", MinP),
    "presence_penalty": ("presence_penalty", PresencePenalty),
    "frequency_penalty": ("frequency_penalty", FrequencyPenalty),
    "seed": ("seed", Seed),
}
FILTERS = ("temp", "top_p", "top_k", "min_p")


def sampled(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the sampling options, in the place of its parameter `sampling`.

    Args:
        names: which; none for all.

    Returns:
        A decorator. The command is called with `sampling`: the values that were given, under the library's names.
    """
    wanted = names or tuple(SAMPLING)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            given = {SAMPLING[name][0]: kwargs.pop(name) for name in wanted}
            command(*args, sampling={k: v for k, v in given.items() if v is not None}, **kwargs)

        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            if parameter.name != "sampling":
                parameters.append(parameter)
                continue
            parameters += [
                inspect.Parameter(name, parameter.kind, default=None, annotation=SAMPLING[name][1]) for name in wanted
            ]
        run.__dict__["__signature__"] = own.replace(parameters=parameters)
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        del run.__dict__["__wrapped__"]  # typer would look through to the command
        return run

    return decorate


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
