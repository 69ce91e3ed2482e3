"""Options that several commands share, each spelled and explained once. Names follow mlx-lm where it has one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from swiftlet_mlx.errors import OptionError

MODEL_HELP = "A .qpack container, an MLX checkpoint folder, an installed model, or demo."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


def example(line: str) -> str:
    """The last lines of a command's help. Never broken, so that they can be copied: a lone backspace says so."""
    return f"\b\n{line}"


def _slot_pool(cache_gb: float | None) -> float | None:
    if cache_gb is not None and not 0 < cache_gb < 1e6:
        raise OptionError(f"--cache-gb {cache_gb} is not a size; give the slot pool in GB, for example --cache-gb 2")
    return cache_gb


CacheGb = Annotated[
    float | None,
    typer.Option(
        "--cache-gb",
        metavar="GB",
        callback=_slot_pool,
        help="Memory for experts, in GB (10^9 bytes). Default: what is free and not needed otherwise."
        " At most all experts.",
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
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, metavar="N", help="Longest reply, in tokens.")]
Temp = Annotated[
    float | None, typer.Option("--temp", metavar="X", help="Sampling temperature; 0 takes the likeliest token.")
]
TopP = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens with this much probability.")
]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Keep the k likeliest tokens; 0 is off.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", metavar="P", help="Drop tokens less likely than this share of the best.")
]
PresencePenalty = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", help="Against tokens already used.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option("--frequency-penalty", metavar="X", help="Against tokens, by use count.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Same seed, same text.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
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
            given = {name: value for name in wanted if (value := kwargs.pop(name)) is not None}
            check(given)
            command(*args, sampling={SAMPLING[name][0]: value for name, value in given.items()}, **kwargs)

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


def check(given: Mapping[str, Any]) -> None:
    """Refuse sampling options that no model takes, by the names they have here, and before one is loaded.

    Raises:
        OptionError: the first that is wrong.
    """
    from swiftlet_mlx.errors import SamplingError
    from swiftlet_mlx.sampling import Sampling

    for name, value in given.items():
        library_name = SAMPLING[name][0]
        try:
            Sampling().with_values(**{library_name: value})
        except SamplingError as error:
            option = "--" + name.replace("_", "-")
            raise OptionError(str(error).replace(library_name, option, 1).rstrip(".")) from None


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
