"""The command `swiftlet-mlx`: registers the commands, turns errors into text and exit codes.

Exit codes: 0 done, 1 failed with one plain message, 2 wrong usage, 130 interrupted. A traceback is a bug; to
see one, set SWIFTLET_MLX_DEBUG=1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from swiftlet_mlx import __version__
from swiftlet_mlx.errors import SwiftletError

from . import chat, generate, info, oracle, remove
from . import list as list_

app = typer.Typer(
    name="swiftlet-mlx",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run Mixture-of-Experts models larger than memory: experts stream from the SSD, answers stay exact.",
    epilog="Example: swiftlet-mlx chat",
)
# One line a command; the order is that of --help.
app.command("chat", epilog=chat.EXAMPLE)(chat.chat)
app.command("generate", epilog=generate.EXAMPLE)(generate.generate)
app.command("info", epilog=info.EXAMPLE)(info.info)
app.command("oracle", epilog=oracle.EXAMPLE)(oracle.oracle)
app.command("list", epilog=list_.EXAMPLE)(list_.list_models)
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
    sys.exit(run(app, args))


def run(app: typer.Typer, args: Sequence[str] | None = None) -> int:
    """Run a command line of any of the project's programs.

    Args:
        app: The program.
        args: Its arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(args, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SwiftletError as error:
        _complain(str(error))
        return error.exit_code
    except TyperException as error:
        # what typer raises for wrong usage can show itself, which its public type does not say
        show = getattr(error, "show", None)
        if show is not None:
            show()
        return int(getattr(error, "exit_code", 2))
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        # the reader of stdout left (`| head`): nothing is wrong, and nothing more can be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("SWIFTLET_MLX_DEBUG"):
            raise
        _complain(
            f"unexpected {type(error).__name__}: {error}\n"
            "This is a bug in swiftlet-mlx. Set SWIFTLET_MLX_DEBUG=1, run it again and report what it prints"
        )
        return 1


def _complain(text: str) -> None:
    print(f"swiftlet-mlx: {text}", file=sys.stderr)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
