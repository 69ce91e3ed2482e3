"""The command `swiftlet-mlx`: one line a command. Each command's module holds its typed function and its example."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from swiftlet_repack import cli as repack

from swiftlet_mlx import __version__

from . import bench, chat, doctor, generate, info, oracle, remembered, remove, serve
from . import list as listing
from .run import run

app = typer.Typer(
    name="swiftlet-mlx",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run Mixture-of-Experts models larger than memory: experts stream from the SSD, answers stay exact.",
    epilog="Example: swiftlet-mlx chat",
)
# The order is that of --help.
app.command("chat", epilog=chat.EXAMPLE)(chat.chat)
app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("serve", epilog=serve.EXAMPLE)(serve.serve)
app.command("repack", epilog=repack.REPACK_EXAMPLE)(repack.repack)
app.command("verify", epilog=repack.VERIFY_EXAMPLE)(repack.verify)
app.command("oracle", epilog=oracle.EXAMPLE)(oracle.oracle)
app.command("info", epilog=info.EXAMPLE)(info.info)
app.command("bench", epilog=bench.EXAMPLE)(bench.bench)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("list", epilog=listing.EXAMPLE)(listing.list_models)
app.command("remove", epilog=remove.EXAMPLE)(remove.remove)


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
    sys.exit(run(app, args))
