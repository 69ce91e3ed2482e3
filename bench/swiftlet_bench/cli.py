"""`python -m swiftlet_bench`: one line a command. Commands that have a program of their own get their arguments as
they are.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from swiftlet_mlx.cli import bench as page
from swiftlet_mlx.cli.run import run

from .commands import contest, curve, disk, forecast, make, moments, one, table

app = typer.Typer(
    name="swiftlet_bench",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure swiftlet-mlx: what a model does on this machine, and whether a change made it better.",
    epilog="Example: python -m swiftlet_bench synthetic --preset medium --output medium.qpack",
)
app.command("bench", epilog=page.EXAMPLE)(page.bench)
app.command("cache-curve", epilog=curve.EXAMPLE)(curve.cache_curve)
app.command("compare", epilog=contest.EXAMPLE)(contest.compare)
app.command("io", epilog=disk.EXAMPLE)(disk.io)
app.command("predict", epilog=forecast.EXAMPLE)(forecast.predict)
app.command("synthetic", epilog=make.EXAMPLE)(make.synthetic)
app.command("timeline", epilog=moments.EXAMPLE)(moments.timeline)
app.command("table", epilog=table.EXAMPLE)(table.table)
app.command("one", epilog=one.EXAMPLE)(one.one)


# Programs with options of their own; what follows their name is theirs.
PROGRAMS = {
    "prefill": "Prompts by length, beside what limits them.",
    "decode": "A token at several cache sizes, and where its time goes.",
    "policy": "Which expert to give up, replayed on recorded routes.",
    "install": "Installing, beside a plain download.",
    "conversation": "Later turns, checkpoints, reopened conversations.",
    "server": "What serving costs over the bare engine.",
}


def _program(name: str) -> Callable[[typer.Context], None]:
    def start(context: typer.Context) -> None:
        sys.argv = [f"swiftlet_bench.{name}", *context.args]
        runpy.run_module(f"swiftlet_bench.{name}", run_name="__main__")

    return start


for _name, _what in PROGRAMS.items():
    app.command(
        _name,
        help=_what,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(_program(_name))


@app.callback()
def _root() -> None:
    pass


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits."""
    sys.exit(run(app, args))
