"""`chat`: turns as arguments, or a conversation at the terminal."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .running import engine_for

if TYPE_CHECKING:
    from swiftlet_mlx.completion import Ask, Completions
    from swiftlet_mlx.session import Session

    from .repl import Repl

EXAMPLE = 'Example: swiftlet-mlx chat demo "What is the capital of Spain?" "And what about France?"'


@options.sampled()
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=options.MODEL_HELP)] = "demo",
    turns: Annotated[list[str] | None, typer.Argument(metavar="TURN", help="Answer these and exit.")] = None,
    session: Annotated[
        Path | None,
        typer.Option("--session", metavar="FILE", help="Go on with the conversation in FILE, and keep it there."),
    ] = None,
    system: options.System = None,
    thinking: options.Thinking = None,
    max_tokens: options.MaxTokens = None,
    cache_gb: options.CacheGb = None,
    io: options.Io = "auto",
    warm: options.Warm = True,
    sampling: dict[str, Any] = {},  # noqa: B006 - given by the decorator, never changed
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Talk to a model. With TURNs, answer each and exit; without, read messages until end of file.

    At a terminal answers are shown as Markdown and /help lists commands. The file of --session is written when the
    conversation ends; until then what is said is noted beside it after every turn.
    """
    from rich.console import Console

    from swiftlet_mlx.completion import Ask, Completions
    from swiftlet_mlx.errors import OptionError

    from .lines import Lines, history_file, valid
    from .repl import Repl

    if " " in model and not Path(model).exists():
        raise OptionError(f'{model!r} is no model but a question: swiftlet-mlx chat demo "{model}"')
    if session is not None:
        _check_place(session)
    with engine_for(
        model,
        cache_gb=cache_gb,
        trust_remote_code=trust_remote_code,
        quiet=quiet,
        verbose=verbose,
        io=io,
        warm=warm,
    ) as (engine, folder):
        completions = Completions(engine, folder)
        ask = Ask(max_tokens=max_tokens, thinking=thinking)
        if sampling:
            defaults = completions.defaults(thinking=completions.thinks(ask))
            ask = replace(ask, sampling=defaults.with_values(**sampling))
        repl = Repl(
            _open(session, completions, ask, valid(system) if system is not None else None),
            Console(highlight=False),
            Lines(None if turns else history_file()),
            quiet=quiet,
            memory=_bytes_in_use,
            autosave=session,
        )
        with _ended_by_signals():
            if turns:
                _answer_all(repl, [valid(text) for text in turns])
            else:
                repl.run()


def _check_place(path: Path) -> None:
    """Refuse, before a model is loaded, a file in which the conversation could not be kept.

    Raises:
        OptionError: what is wrong with it.
    """
    from swiftlet_mlx.errors import OptionError

    if path.exists() and not path.is_file():
        raise OptionError(f"--session {path} is no file; give the file to keep the conversation in")
    if not path.parent.is_dir():
        raise OptionError(f"--session {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(f"--session {path}: {path.parent.resolve()} cannot be written to; choose another place")


def _open(path: Path | None, completions: Completions, ask: Ask, system: str | None) -> Session:
    from swiftlet_mlx.session import Session

    if path is None or not Session.is_saved(path):
        return Session(completions, system=system, ask=ask)
    session = Session.load(path, completions, ask=ask)
    if system is not None:
        session.system = system
    return session


def _answer_all(repl: Repl, turns: list[str]) -> None:
    try:
        for text in turns:
            if not repl.ask(text):
                raise KeyboardInterrupt
    finally:
        repl.close()


def _bytes_in_use() -> int:
    import mlx.core as mx

    return mx.get_active_memory() + mx.get_cache_memory()


class _ended_by_signals:
    """A closed terminal and a polite kill end the conversation as /exit does, with its file written."""

    NAMES = ("SIGTERM", "SIGHUP")

    def __enter__(self) -> None:
        self._before = {n: signal.signal(n, _leave) for name in self.NAMES if (n := getattr(signal, name, None))}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
