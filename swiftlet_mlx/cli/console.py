"""Where a command's words go: stderr for people, stdout for results; numbers in the units people read.

Knows rich and the terminal; nothing of models. Invariant: with --quiet, or where stderr is not a terminal, there is
no progress bar and no control character.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from swiftlet_mlx.units import size as size  # re-exported: what a command prints, it gets here

err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str, style: str | None = None) -> None:
    """A line for the person at the terminal, broken between words there and not at all in a file."""
    err.print(text, style=style, markup=False, soft_wrap=not err.is_terminal)


def warn(text: str) -> None:
    say(f"warning: {text}", "yellow")


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on a terminal, nothing elsewhere.

    Yields:
        A callback `(bytes done, bytes in all, what)`.
    """
    if quiet or not err.is_terminal:
        yield lambda done, total, what: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _bar(columns) as update:
        yield update


@contextmanager
def steps(quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """The same for work that is counted in steps instead of bytes."""
    if quiet or not err.is_terminal:
        yield lambda done, total, what: None
        return
    with _bar((BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())) as update:
        yield update


@contextmanager
def _bar(columns: tuple[ProgressColumn, ...]) -> Iterator[Callable[[int, int, str], None]]:
    with Progress(TextColumn("{task.description}"), *columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def write(text: str) -> None:
    """Part of a result, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()
