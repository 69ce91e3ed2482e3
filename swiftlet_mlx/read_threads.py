"""Threads that read: urgent work first, work for idle time behind it.

They run plain functions that touch bytes; MLX is never called on them. `concurrent.futures` costs 16 us a task and 130
for eight (2-core Linux machine, 2026-12), a tenth of a layer's time; one queue written in C costs 2.
Invariant: idle work never keeps more than one thread from urgent work that arrives, and the threads end with the last
reference to their owner.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Callable[..., Any], tuple[Any, ...]]


class ReadThreads:
    """A fixed number of threads, started with the first task.

    Args:
        count: How many read at once.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._idle: deque[_Task] = deque()
        self._idling = threading.Lock()  # held while a turn of idle work is in the queue or running
        self._go_on = threading.Event()
        self._started = False
        self.closed = False
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._tasks, count)

    def post(self, work: Callable[..., Any], *args: Any) -> None:
        """Run `work` soon. It must not raise: nobody would hear it."""
        if self.closed:
            raise RuntimeError("the read threads are closed")
        if not self._started:
            self._start()
        self._tasks.put((work, args))

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work` soon; the future holds what it returns or raises."""
        future: Future[T] = Future()
        self.post(_into, future, work, args)
        return future

    def post_idle(self, work: Callable[..., Any], *args: Any) -> None:
        """Run `work`, which must not raise, when no urgent work is waiting; one such task at a time."""
        self._idle.append((work, args))
        if self._idling.acquire(blocking=False):
            self.post(_turn, self._tasks, self._idle, self._idling)

    def help(self) -> None:
        """Run here what nobody has begun, for a caller that would only wait: a thread takes longer to wake up than a
        small read takes."""
        try:
            while True:
                task = self._tasks.get_nowait()
                if task is None or task[0] is _turn:  # the end, or idle work: for the threads
                    self._tasks.put(task)
                    return
                task[0](*task[1])
        except Empty:
            return

    def drain(self) -> None:
        """Return when all that was posted before has ended. One broken off (Ctrl-C) wants to be called again."""
        if self._started:
            self._go_on.set()  # whom a drain that was broken off still keeps
            here, go_on = threading.Semaphore(0), threading.Event()
            self._go_on = go_on
            for _ in range(self.count):  # a thread comes here only when its work before is done, and stays
                self._tasks.put((_meet, (here, go_on)))
            for _ in range(self.count):
                here.acquire()
            go_on.set()

    def drop_idle(self) -> None:
        """Forget idle work that has not begun."""
        self._idle.clear()

    def close(self) -> None:
        """Finish what was posted, drop idle work, end the threads. Callable twice."""
        self.closed = True
        self.drop_idle()
        self._go_on.set()
        self._end()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start(self) -> None:
        self._started = True
        for n in range(self.count):
            thread = threading.Thread(target=_run, args=(self._tasks,), name=f"expert-read-{n}", daemon=True)
            thread.start()
            self._threads.append(thread)


def _run(tasks: SimpleQueue[_Task | None]) -> None:
    """What each thread runs. Holds the queue and nothing else, so that a forgotten owner can end it."""
    while (task := tasks.get()) is not None:
        task[0](*task[1])
        del task  # buffers of the last task must not live until the next one


def _turn(tasks: SimpleQueue[_Task | None], idle: deque[_Task], idling: threading.Lock) -> None:
    """One piece of idle work, then back to the end of the queue: whatever has arrived goes first."""
    try:
        work, args = idle.popleft()
    except IndexError:
        idling.release()
        if idle and idling.acquire(blocking=False):  # posted between the look and the release
            tasks.put((_turn, (tasks, idle, idling)))
        return
    work(*args)
    tasks.put((_turn, (tasks, idle, idling)))


def _meet(here: threading.Semaphore, go_on: threading.Event) -> None:
    here.release()
    go_on.wait()


def _into(future: Future[T], work: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)


def _end(tasks: SimpleQueue[_Task | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)
