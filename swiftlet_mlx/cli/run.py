"""Run a command line: errors become one plain message, every way to end its exit code.

Exit codes: 0 done, 1 failed with one plain message, 2 wrong usage, 130 interrupted. A traceback is a bug; to see one,
set SWIFTLET_MLX_DEBUG=1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from swiftlet_mlx.errors import SwiftletError

INTERRUPTED = 130


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
        if code == INTERRUPTED:  # typer makes this of KeyboardInterrupt, and says nothing
            _complain("interrupted")
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
        return INTERRUPTED
    except BrokenPipeError:
        return _unread()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer has seen it first
            return _unread()
        raise
    except OSError as error:  # a full disk behind `>`, a name that no file system takes
        if os.environ.get("SWIFTLET_MLX_DEBUG"):
            raise
        _complain(f"{str(error.filename)[:200]}: {error.strerror}" if error.filename else str(error))
        return 1
    except Exception as error:
        if os.environ.get("SWIFTLET_MLX_DEBUG"):
            raise
        _complain(
            f"unexpected {type(error).__name__}: {error}\n"
            "This is a bug in swiftlet-mlx. Set SWIFTLET_MLX_DEBUG=1, run it again and report what it prints"
        )
        return 1


def _unread() -> int:
    """The reader of stdout left (`| head`): nothing is wrong, and nothing more can be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what is still buffered goes there when the interpreter flushes it
    os.close(nowhere)
    return 0


def _complain(text: str) -> None:
    print(f"swiftlet-mlx: {text}", file=sys.stderr)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
