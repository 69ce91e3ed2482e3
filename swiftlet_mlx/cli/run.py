"""Run a command line: errors become one plain message, every way to end its exit code.

Exit codes: 0 done, 1 failed with one plain message, 2 wrong usage, 130 interrupted. A traceback is a bug; to see one,
set SWIFTLET_MLX_DEBUG=1.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import typer
from typer.exceptions import TyperException

from swiftlet_mlx.errors import SwiftletError

INTERRUPTED = 130
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_WRONG_VALUE = re.compile(r"Invalid value for '?(?P<name>.+?)'?: Input (?P<wanted>should .+?)(, unable .*)?", re.DOTALL)


def run(app: typer.Typer, args: Sequence[str] | None = None) -> int:
    """Run a command line of any of the project's programs.

    Args:
        app: The program.
        args: Its arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    _open_closed_streams()
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = _command(app)(args, standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer makes this of KeyboardInterrupt, and says nothing
            _say_interrupted()
        return code if isinstance(code, int) else 0
    except SwiftletError as error:
        _complain(str(error))
        return error.exit_code
    except TyperException as error:
        _complain(_in_one_line(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say_interrupted()
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
        if error.filename:
            _complain(f"{str(error.filename)[:200]}: {error.strerror}")
        else:
            what = "the output cannot be written: " if error.errno in _CANNOT_WRITE else ""
            _complain(f"{what}{error.strerror or error}")
        return 1
    except Exception as error:
        if os.environ.get("SWIFTLET_MLX_DEBUG"):
            raise
        _complain(
            f"unexpected {type(error).__name__}: {error}\n"
            "This is a bug in swiftlet-mlx. Set SWIFTLET_MLX_DEBUG=1, run it again and report what it prints"
        )
        return 1


@lru_cache(maxsize=4)  # 30 ms: it reads the signature of every command
def _command(app: typer.Typer) -> Callable[..., Any]:
    return typer.main.get_command(app)


def _open_closed_streams() -> None:
    """Where the caller closed a standard stream, there is nothing to read and nobody to write to, which is no error.
    Left closed, its number would go to the next file that is opened."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process


def _in_one_line(error: TyperException) -> str:
    """What typer says of wrong usage, in a line and with what was found; a whole page of help stays one."""
    text = error.format_message()
    if "\n" in text:
        return text
    wrong, cause = _WRONG_VALUE.fullmatch(text), error.__cause__
    errors = getattr(cause, "errors", None)  # pydantic's, which typer hides
    if wrong and errors is not None:
        text = f"{wrong['name']} {errors()[0]['input']} {wrong['wanted']}"
    context = getattr(error, "ctx", None)
    program = context.command_path if context is not None else "swiftlet-mlx"
    return f"{text.rstrip('.')}. `{program} --help` shows what there is"


def _unread() -> int:
    """The reader of stdout left (`| head`): nothing is wrong, and nothing more can be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what is still buffered goes there when the interpreter flushes it
    os.close(nowhere)
    return 0


def _complain(text: str) -> None:
    print(text if text.startswith("Usage: ") else f"swiftlet-mlx: {text}", file=sys.stderr)


def _say_interrupted() -> None:
    if sys.stderr.isatty():  # which shows ^C where the cursor stood, behind a question or half an answer
        print(file=sys.stderr)
    _complain("interrupted")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
