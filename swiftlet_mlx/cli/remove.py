"""`remove`: delete a model from the models folder or from the hub cache, after asking."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import console

EXAMPLE = "Example: swiftlet-mlx remove Qwen3.6-35B-A3B-4bit"


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `list` shows, or a container's path.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from this machine, after asking."""
    from swiftlet_mlx.errors import OptionError
    from swiftlet_mlx.library import delete, one
    from swiftlet_mlx.locate import DEMO

    if name == DEMO:
        raise OptionError("demo comes with the package and goes with it: pip uninstall swiftlet-mlx")
    found = one(name)
    what = f"{found.name} ({found.kind}, {console.size(found.nbytes)}, {found.path})"
    if not yes:
        if not sys.stdin.isatty():
            raise OptionError(f"{what} would be deleted; pass --yes to do that without a question")
        if not typer.confirm(f"Delete {what}?", err=True):
            console.say("nothing was deleted")
            raise typer.Exit(1)
    freed = delete(found)
    console.say(f"deleted {found.name}, {console.size(freed)} freed")
