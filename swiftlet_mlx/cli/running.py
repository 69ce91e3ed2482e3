"""From a command's options to a running engine, the same way for every command that generates."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console
from .care import cared_for
from .left_open import AUTO, cache_gb_for, io_for

if TYPE_CHECKING:
    from swiftlet_mlx.engine import Engine

SILENT_SECONDS = 1.0
DEMO_LINE = (
    "demo: a small model that comes with the package. To install a real one:\n"
    "  swiftlet-mlx repack --from-hf mlx-community/Qwen3.6-35B-A3B-4bit"
)


@contextmanager
def engine_for(
    model: str,
    *,
    cache_gb: float | None,
    trust_remote_code: bool = False,
    with_text: bool | None = True,
    quiet: bool = False,
    verbose: bool = False,
    warn: Callable[[str], None] = console.warn,
    io: str = AUTO,
    warm: bool = True,
    routes: Path | None = None,
    **engine_options: Any,
) -> Iterator[tuple[Engine, Path]]:
    """A loaded engine and the model's folder, closed at the end.

    Args:
        model: What the user named.
        cache_gb: Slot pool in GB, None to ask the machine.
        trust_remote_code: Run Python files of the model folder.
        with_text: Load the tokenizer too; None only where the folder has one. Without, token ids go in and out.
        quiet: No remarks.
        verbose: Say how memory is divided.
        warn: Where remarks go.
        io: `cached`, `direct`, or `auto` for what doctor has found.
        warm: Use and keep the hot list.
        routes: Record the routes of decode steps here.
        engine_options: Passed to `Engine`.

    Raises:
        SwiftletError: the cause of a failed load, not the engine's wrapper around it.
    """
    from swiftlet_mlx.engine import Engine
    from swiftlet_mlx.errors import EngineFailed, SwiftletError
    from swiftlet_mlx.locate import DEMO, find_model

    folder = find_model(model)
    if model == DEMO and not quiet:
        console.say(DEMO_LINE)
    remark = (lambda text: None) if quiet else warn
    open_model = opening(folder, cache_gb, trust_remote_code, with_text, remark, io)
    with Engine(open_model, counters=counters, **engine_options) as engine:
        try:
            _wait(engine, folder.name, quiet)
        except EngineFailed as error:
            if isinstance(error.__cause__, SwiftletError):
                raise error.__cause__ from None
            raise
        if verbose:
            say_plan(engine)
        with cared_for(engine, folder, warm=warm, routes=routes):
            yield engine, folder


def _wait(engine: Engine, name: str, quiet: bool) -> None:
    """Until the model is loaded; a person who has to wait for it is told what for."""
    if not quiet and console.err.is_terminal:
        try:
            engine.wait(SILENT_SECONDS)
        except TimeoutError:
            console.say(f"loading {name} ...")
    engine.wait()


def say_plan(engine: Engine) -> None:
    """The parts of a loaded model's memory, on stderr."""
    console.say(engine.model.pools.plan.table())


def opening(
    folder: Path,
    cache_gb: float | None,
    trust_remote_code: bool,
    with_text: bool | None,
    warn: Callable[[str], None],
    io: str = AUTO,
) -> Callable[[], tuple[Any, Any]]:
    """What an engine calls to load a model; the arguments are those of `engine_for`."""
    from swiftlet_mlx.loader import has_tokenizer, load, load_streamed

    chosen: Any = {"cache_gb": cache_gb_for(folder, cache_gb), "io": io_for(io)}

    def open_model() -> tuple[Any, Any]:
        settings: Any = {**chosen, "trust_remote_code": trust_remote_code, "warn": warn}
        if has_tokenizer(folder) if with_text is None else with_text:
            pair: tuple[Any, Any] = load(folder, **settings)
            return pair
        loaded, _ = load_streamed(folder, **settings)
        return loaded, None

    return open_model


def counters(model: Any) -> Mapping[str, Any]:
    """A streamed model's running counters."""
    stats = model.pools.stats
    return {name: getattr(stats, name) for name in ("hits", "misses", "evictions", "reads", "read_bytes", "read_backs")}


def peak_rss_bytes() -> int:
    """The most memory this process has had resident, as the system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes (not run here), Linux KiB


def versions() -> dict[str, str]:
    """What a report needs to be reproducible."""
    from importlib.metadata import version

    import mlx.core as mx

    names = ("swiftlet-mlx", "mlx", "mlx-lm")
    return {
        **{name: version(name) for name in names},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
    }
