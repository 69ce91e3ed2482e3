"""The part of `repack` that installs: shows the plan, asks, shows progress, says how to continue.

Knows the terminal and the installation's words and numbers; fetches nothing itself. Invariant: where stderr
is not a terminal, no question is asked and every line is plain.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from swiftlet_mlx.cli import console
from swiftlet_mlx.errors import OptionError, SwiftletError
from swiftlet_mlx.library import SUFFIX, models_folder

from . import transfer
from .check import check_against
from .fetch import Fetcher
from .install import Installation, Outcome
from .outline import Outline, check_room
from .pace import Pace
from .patience import Retry
from .sources import Hub, Mirror, Source, folder_name

PLAIN_SECONDS = 5.0  # between two lines where there is no terminal


def source_of(from_hf: str | None, from_url: str | None, revision: str | None) -> Source:
    """The source that the options name.

    Raises:
        OptionError: if they name none, or a revision of something that has none.
    """
    if from_hf is not None:
        return Hub(from_hf, revision=revision)
    if from_url is None:
        raise OptionError("nothing to install; pass --from-hf ORG/NAME or --from-url https://host/folder")
    if revision is not None:
        raise OptionError("--revision belongs to --from-hf; a web folder has no revisions")
    return Mirror(from_url)


def install(
    source: Source,
    output: Path | None,
    *,
    dry_run: bool = False,
    yes: bool = False,
    restart: bool = False,
    streams: int = 4,
    quiet: bool = False,
) -> Path | None:
    """Install from a source, talking to the person at the terminal; the container, or None after a dry run.

    Raises:
        SwiftletError: with what to do; the command that continues was printed before.
        typer.Exit: if the person said no.
    """
    target = output or models_folder() / folder_name(source.name)
    if output is None and not dry_run:
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with Installation(
            source, target, restart=restart, pace=Pace(streams=streams), on_retry=_say_retry(quiet)
        ) as work:
            outline = work.look()
            if not quiet or dry_run:
                for line in describe(outline):
                    console.say(line)
            check_room(outline)
            if dry_run:
                return None
            asks = not yes and sys.stdin.isatty() and console.err.is_terminal
            if asks and not typer.confirm("Go on?", default=True, err=True):
                console.say("nothing was downloaded")
                raise typer.Exit(1)
            with _display(outline, quiet) as update:
                outcome = work.carry_out(update)
    except (SwiftletError, KeyboardInterrupt):
        if target.with_name(target.name + ".partial").exists():
            console.say(f"to continue: {_same_command()}")
        raise
    _say_done(outcome)
    return outcome.output


def check_source(container: Path, source: Source, *, quiet: bool = False) -> None:
    """Verify a container against the hashes that a source announces, and say what was found.

    Raises:
        SwiftletError: naming what does not fit.
    """
    with console.progress(quiet) as progress:
        found = check_against(container, source, Fetcher(source, on_retry=_say_retry(quiet)), progress)
    if not quiet:
        at = f" at commit {found.commit[:12]}" if found.commit else ""
        console.say(
            f"{found.files} files of {found.source}{at}, {console.size(found.nbytes)}: every hash fits "
            f"({console.size(found.fetched_bytes)} fetched for it)"
        )


def describe(outline: Outline) -> Iterator[str]:
    """The plan in lines of words and sizes."""
    size = console.size
    at = f" at commit {outline.commit[:12]}" if outline.commit else ""
    what = "a ready container, copied file by file" if outline.ready else "an MLX checkpoint, repacked on the way"
    yield f"source     {outline.source}{at}: {what}"
    here = outline.download_bytes - outline.missing_bytes
    have = f", {size(here)} of it are here already" if outline.resumed and here else ""
    yield f"download   {size(outline.download_bytes)}{have}"
    yield f"container  {size(outline.output_bytes)} in {outline.output}"
    yield f"disk       {size(outline.needed_bytes)} needed, {size(outline.free_bytes)} free"
    yield (
        f"to run     {size(outline.dense_bytes)} of dense weights in memory, and an expert cache; "
        f"one token reads {size(outline.token_bytes)} of experts, a smaller cache than that is slow"
    )
    for remark in outline.left_out:
        yield f"left out   {remark}"
    for warning in outline.warnings:
        yield f"warning    {warning}"


@contextmanager
def _display(outline: Outline, quiet: bool) -> Iterator[Callable[[transfer.Progress], None]]:
    if quiet:
        yield lambda moment: None
    elif console.err.is_terminal:
        with _bar(outline) as update:
            yield update
    else:
        yield _Lines(outline)


@contextmanager
def _bar(outline: Outline) -> Iterator[Callable[[transfer.Progress], None]]:
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console.err, transient=True) as bar:
        here = outline.download_bytes - outline.missing_bytes
        fetching = bar.add_task("", total=outline.download_bytes, completed=here)
        hashing: list[TaskID] = []

        def update(moment: transfer.Progress) -> None:
            if moment.phase == "hashing":
                if not hashing:
                    bar.update(fetching, completed=outline.download_bytes)
                    hashing.append(bar.add_task("hashing", total=moment.total_bytes))
                bar.update(hashing[0], completed=moment.done_bytes)
            else:
                bar.update(fetching, completed=moment.done_bytes, description=_what(moment))

        yield update


class _Lines:
    """A line every few seconds, for logs."""

    def __init__(self, outline: Outline) -> None:
        self._begun = self._said = time.monotonic()

    def __call__(self, moment: transfer.Progress) -> None:
        now = time.monotonic()
        if now - self._said < PLAIN_SECONDS:
            return
        self._said = now
        size = console.size
        if moment.phase == "hashing":
            console.say(f"hashing {size(moment.done_bytes)} of {size(moment.total_bytes)}")
            return
        rate = moment.fetched_bytes / max(now - self._begun, 1e-3)
        left = (moment.total_bytes - moment.done_bytes) / rate if rate else 0
        until = f", {_clock(left)} left" if rate else ""
        console.say(f"{size(moment.done_bytes)} of {size(moment.total_bytes)}, {size(rate)}/s{until}: {_what(moment)}")


def _what(moment: transfer.Progress) -> str:
    retries = f", {moment.retries} retries" if moment.retries else ""
    if moment.done_bytes >= moment.total_bytes:
        return f"verifying {console.size(moment.hashed_bytes)}{retries}"
    return f"{moment.current}{retries}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _say_retry(quiet: bool) -> Callable[[Retry], None]:
    def say(retry: Retry) -> None:
        if not quiet and retry.seconds >= 1:
            console.say(f"{retry.file}: {retry.reason}; trying again in {retry.seconds:.0f} s")

    return say


def _say_done(outcome: Outcome) -> None:
    for repair in outcome.repairs:
        console.warn(f"{repair.file}: bytes {repair.start}-{repair.stop - 1} had arrived wrong and were fetched again")
    console.say(f"installed and verified: {outcome.output}")
    known = outcome.output.parent == models_folder()
    name = outcome.output.name.removesuffix(SUFFIX) if known else str(outcome.output)
    console.say(f"to use it: swiftlet-mlx chat {shlex.quote(name)}")


def _same_command() -> str:
    program = Path(sys.argv[0]).name if sys.argv else ""
    words = ["swiftlet-mlx" if program in ("", "__main__.py", "-c") else program, *sys.argv[1:]]
    return shlex.join(_without_secrets(word) for word in words if word != "--restart")


def _without_secrets(word: str) -> str:
    """A word of the command line for a screen that others may read and for logs; what is hidden is marked."""
    option, equals, address = word.partition("=") if word.startswith("--") else ("", "", word)
    if not address.startswith(("http://", "https://")):
        return word
    parts = urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    netloc = f"{user.partition(':')[0]}:***{at}{host}" if at else host
    return option + equals + urlunsplit(parts._replace(netloc=netloc, query="***" if parts.query else ""))
