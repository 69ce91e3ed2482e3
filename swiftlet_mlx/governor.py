"""How much memory the slots should have: as much as helps, less when the machine needs it. And whether to read ahead.

Three rules and what drives them. Pure decisions on numbers, tested without a clock; the drivers only measure and ask.
Invariant: no rule asks for less than its floor or more than its ceiling.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median

from .machine import Pressure, pressure
from .pools import Pools
from .stats import Stats

WINDOW = 48  # steps a size is judged by, after as many to fill the new slots
GROWTH = 1.25
WORTH = 0.03  # of a step's time that a quarter more memory must save to be kept
IDLE = 0.05  # share of a step spent waiting below which no memory can help noticeably

TURN = 24  # steps
TURNS = 3  # with reading ahead, and as many without
WORTH_A_TRIAL = 0.1  # share of a step spent waiting
PAYS = 0.02  # of a step's time that it must save
AGAIN = 4096  # steps until it is tried anew: topics, machines and their other work change

CALM_SECONDS = 30.0  # without pressure before the pool grows again
PAUSE_SECONDS = 5.0  # between two changes: pressure takes a moment to show that it has gone


class Search:
    """Where more memory no longer helps: grow while each quarter more saves time, step back once and stay.

    Beyond some size a cache of one's own only takes memory from the page cache, and steps become slower again.
    """

    def __init__(self, floor: int, ceiling: int, size: int) -> None:
        self.floor, self.ceiling = floor, max(floor, ceiling)
        self.size = min(max(size, floor), self.ceiling)
        self.settled = self.size == self.ceiling
        self._before: tuple[int, float] | None = None  # the size before, and its step time

    def judge(self, step_seconds: float, wait_seconds: float) -> int:
        """Take in what a step costs at the present size.

        Args:
            step_seconds: of a typical step.
            wait_seconds: of it, spent waiting for reads.

        Returns:
            The size to have from now on.
        """
        if self.settled:
            return self.size
        if self._before is not None and step_seconds > (1 - WORTH) * self._before[1]:
            self.size, self.settled = self._before[0], True
        elif wait_seconds < IDLE * step_seconds or self.size == self.ceiling:
            self.settled = True
        else:
            self._before = self.size, step_seconds
            self.size = min(int(self.size * GROWTH), self.ceiling)
        return self.size


class Governor:
    """Measures the steps of a model and says what its pools should have. To be set as `pools.on_step`.

    Args:
        stats: of the pools; the pools themselves are not held, or they would outlive their model.
        search: decides.
        clock: seconds.
    """

    def __init__(self, stats: Stats, search: Search, clock: Callable[[], float] = time.perf_counter) -> None:
        self.search = search
        self._stats = stats
        self._clock = clock
        self._steps: list[tuple[float, float]] = []  # seconds, of which waiting
        self._last: tuple[float, float] | None = None

    def __call__(self) -> int | None:
        """A step begins. Returns the size to have from now on, None to leave it."""
        if self.search.settled:
            return None
        now, waited = self._clock(), self._stats.wait_seconds
        if self._last is not None:
            self._steps.append((now - self._last[0], waited - self._last[1]))
        self._last = now, waited
        if len(self._steps) < 2 * WINDOW:
            return None
        steps = self._steps[WINDOW:]
        typical = median(seconds for seconds, _ in steps)
        # a prompt or a pause of the user between two steps is no step
        waits = [wait for seconds, wait in steps if seconds < 4 * typical]
        self._steps.clear()
        before = self.search.size
        size = self.search.judge(typical, sum(waits) / len(waits))
        return size if size != before else None


class Trial:
    """Whether reading ahead pays on this machine: done and left out in turns, and kept up if it won each time.

    Args:
        stats: of the pools.
        ready: whether step times mean anything yet.
        clock: seconds.
    """

    def __init__(
        self, stats: Stats, ready: Callable[[], bool] = lambda: True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.pays = False
        self._stats, self._ready, self._clock = stats, ready, clock
        self._times: list[float] = []  # typical step of each turn so far, every second one with reading ahead
        self._steps: list[float] = []
        self._last: float | None = None
        self._waited = 0.0
        self._rest = 0  # steps until the next trial

    def __call__(self) -> bool:
        """A step begins. Returns whether to read ahead in it."""
        if self._rest:
            self._rest -= 1
            return self.pays
        if not self._ready():
            return False
        now = self._clock()
        if self._last is None:
            self._waited = self._stats.wait_seconds
        else:
            self._steps.append(now - self._last)
        self._last = now
        if len(self._steps) == TURN:
            self._judge()
        return len(self._times) % 2 == 1 if not self._rest else self.pays

    def _judge(self) -> None:
        typical = median(self._steps)
        waited, self._waited = self._stats.wait_seconds - self._waited, self._stats.wait_seconds
        if not self._times and waited < WORTH_A_TRIAL * typical * TURN:
            self._end(pays=False)  # nothing to win
            return
        self._times.append(typical)
        self._steps.clear()
        if len(self._times) == 2 * TURNS:
            without, ahead = self._times[::2], self._times[1::2]
            self._end(all(b < (1 - PAYS) * a for a, b in zip(without, ahead, strict=True)))

    def _end(self, pays: bool) -> None:
        self.pays, self._rest, self._last = pays, AGAIN, None
        self._times.clear()
        self._steps.clear()


class Relief:
    """What to give back under pressure, and how to take it again: at once down, slowly up."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.limit: int | None = None  # None while nothing is held back
        self._changed = self._calm_since = -CALM_SECONDS

    def judge(self, grade: Pressure, size: int, now: float) -> int | None:
        """Take in the machine's state.

        Args:
            grade: of the pressure.
            size: the pools' present bytes.
            now: seconds on any clock.

        Returns:
            The limit from now on; None for none.
        """
        if grade is not Pressure.NORMAL:
            self._calm_since = now
            if now - self._changed >= PAUSE_SECONDS:
                part = 0.5 if grade is Pressure.CRITICAL else 0.75
                self.limit = max(self.floor, int(part * size))
                self._changed = now
        elif self.limit is not None and now - max(self._calm_since + CALM_SECONDS, self._changed + PAUSE_SECONDS) >= 0:
            # what was asked for is reached when a raised limit no longer makes the pools larger
            self.limit = None if self.limit > 1.3 * size else int(1.1 * self.limit) + 1
            self._changed = now
        return self.limit


class Watcher:
    """A thread that limits a model's pools while the machine is short of memory. It touches no MLX.

    Args:
        pools: of the model.
        floor: bytes never to go below.
        apply: lets the owner of the model apply a new limit now, if it is idle; else the next step does.
        read: the machine's state.
        seconds: between two looks.
    """

    def __init__(
        self,
        pools: Pools,
        floor: int,
        apply: Callable[[], object] | None = None,
        read: Callable[[], Pressure] = pressure,
        seconds: float = 1.0,
    ) -> None:
        self._pools, self._relief = pools, Relief(floor)
        self._apply, self._read, self._seconds = apply, read, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-pressure", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; a limit in force stays."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            before = self._relief.limit
            limit = self._relief.judge(self._read(), self._pools.nbytes, time.monotonic())
            if limit != before:
                self._pools.limit(limit)
                if self._apply is not None:
                    self._apply()
