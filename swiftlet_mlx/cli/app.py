"""The command `swiftlet-mlx`: one line a command. Each command's module holds its typed function and its example."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from swiftlet_repack import cli as repack

from swiftlet_mlx import __version__

from . import bench, chat, doctor, generate, info, options, oracle, remembered, remove, serve
from . import list as listing
from .run import run

app = typer.Typer(
    name="swiftlet-mlx",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run Mixture-of-Experts models larger than memory: experts stream from the SSD, answers stay exact.",
    epilog=options.example("Example: swiftlet-mlx chat"),
)
COMMANDS = (  # in the order of --help
    ("chat", chat.chat, chat.EXAMPLE),
    ("generate", generate.generate, generate.EXAMPLE),
    ("serve", serve.serve, serve.EXAMPLE),
    ("repack", repack.repack, repack.REPACK_EXAMPLE),
    ("verify", repack.verify, repack.VERIFY_EXAMPLE),
    ("oracle", oracle.oracle, oracle.EXAMPLE),
    ("info", info.info, info.EXAMPLE),
    ("bench", bench.bench, bench.EXAMPLE),
    ("doctor", doctor.doctor, doctor.EXAMPLE),
    ("list", listing.list_models, listing.EXAMPLE),
    ("remove", remove.remove, remove.EXAMPLE),
)
for _name, _command, _example in COMMANDS:
    app.command(_name, epilog=options.example(_example))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"swiftlet-mlx {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Console script. Runs a command and exits."""
    remembered.apply()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read at its import; what it warns of, a command says
    sys.exit(run(app, args))
