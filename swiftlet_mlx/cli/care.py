"""What goes on beside a running model: its hot list, the machine's memory, a record of its routes.

Knows where a user's cache folder is; the work is in warm.py, governor.py and route_file.py. Invariant: but for a route
file that cannot be written, nothing here keeps a command from starting or ending.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftlet_mlx.engine import Engine

LAST_WORDS_SECONDS = 2.0  # a command that ends waits no longer for an engine that is still at work


def cache_folder() -> Path:
    """Where this user's caches are."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "swiftlet-mlx"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftlet-mlx"


@contextmanager
def cared_for(engine: Engine, folder: Path, *, warm: bool = True, routes: Path | None = None) -> Iterator[None]:
    """While a command uses an engine.

    Args:
        engine: loaded or loading.
        folder: of its model.
        warm: read the experts this user needs most at the start, and remember what was used at the end.
        routes: a file to record the experts of each decode step in.
    """
    from swiftlet_mlx import warm as hot
    from swiftlet_mlx.budget import minimum_bytes
    from swiftlet_mlx.errors import SwiftletError
    from swiftlet_mlx.governor import Watcher
    from swiftlet_mlx.route_file import RouteFile, RouteInfo

    name = hot.model_hash(folder)
    list_file = cache_folder() / "hot" / f"{name[:32]}.json"
    before = hot.read(list_file, name) if warm else {}

    with ExitStack() as ends:

        def start() -> None:  # on the engine thread, when the model is there
            pools = engine.model.pools
            tables = pools.source.tables
            watcher = Watcher(pools, minimum_bytes(tables, pools.top_k), apply=lambda: engine.call(pools.apply))
            ends.callback(watcher.close)
            if before:
                hot.start(pools, before)
            if routes is not None:
                first = next(iter(tables.values()))
                info = RouteInfo(folder.name, tuple(tables), first.expert_count, pools.top_k, first.payload_bytes)
                pools.recorder = ends.enter_context(RouteFile(routes, info))

        def keep() -> None:  # on the engine thread, when it is idle
            pools = engine.model.pools
            pools.recorder = None
            if warm and any(pool.policy.uses for pool in pools.layers.values()):
                hot.write(list_file, name, hot.learned(pools, before))

        started = engine.call(start)
        try:
            if routes is not None:
                started.result()  # a file that cannot be written is told before the work begins
            yield
        finally:
            started.cancel()
            try:
                engine.call(keep).result(LAST_WORDS_SECONDS)
            except (SwiftletError, OSError, TimeoutError, CancelledError):
                pass
