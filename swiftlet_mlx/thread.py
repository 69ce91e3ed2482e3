"""Threads that MLX may be used on, and that never end.

MLX keeps caches of compiled functions per thread and frees them, Python objects among them, when the thread of the
operating system ends. Python's join returns before that. If the interpreter is leaving by then, the process aborts
("terminate called without an active exception", seen with mlx 0.32.4 on Python 3.11). So a thread that has run MLX is
not ended but parked, to be used for the next engine; a parked thread holds no work and is no hindrance at exit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

_parked: list[_Thread] = []
_lock = threading.Lock()
os.register_at_fork(after_in_child=_parked.clear)  # a forked process has none of the threads


class Run:
    """A function at work on a thread of its own."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function
        self.ident = 0
        self._done = threading.Event()

    def wait(self) -> None:
        """Block until the function has returned. At once on the thread that runs it, which must not wait for itself
        (a garbage collector may call from anywhere)."""
        if threading.get_ident() != self.ident:
            self._done.wait()

    @property
    def running(self) -> bool:
        """True until the function has returned."""
        return not self._done.is_set()

    def ended(self) -> None:
        """Called by the thread."""
        self._done.set()


def start(function: Callable[[], None]) -> Run:
    """Run a function on a thread that nothing else uses meanwhile. It must not raise."""
    run = Run(function)
    with _lock:
        thread = _parked.pop() if _parked else None
    (thread or _Thread()).give(run)
    return run


class _Thread:
    def __init__(self) -> None:
        self._work: Run | None = None
        self._given = threading.Semaphore(0)
        # A daemon, for it never ends; who started it waits for its work at exit, see Engine.
        threading.Thread(target=self._serve, name="swiftlet-engine", daemon=True).start()

    def give(self, run: Run) -> None:
        self._work = run
        self._given.release()

    def _serve(self) -> None:
        while True:
            self._given.acquire()
            run, self._work = self._work, None
            if run is not None and run.function is not None:
                run.ident = threading.get_ident()
                try:
                    run.function()
                finally:
                    run.function = None
                    with _lock:
                        _parked.append(self)
                    run.ended()
                    run = None
