"""Read threads: everything posted runs, urgent work before idle work, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
from queue import SimpleQueue

import pytest

from swiftlet_mlx.read_threads import ReadThreads


def test_submitted_work_returns_or_raises_through_its_future() -> None:
    threads = ReadThreads(2)
    assert [f.result(5) for f in [threads.submit(pow, 2, n) for n in range(20)]] == [2**n for n in range(20)]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(5)
    assert threads.submit(int).result(5) == 0, "a thread that met an error goes on"
    threads.close()


def test_drain_returns_after_everything_posted_before() -> None:
    threads, ended = ReadThreads(3), []
    for n in range(9):
        threads.post(lambda n=n: (time.sleep(0.002 * (n % 4)), ended.append(n)))
    threads.drain()
    assert sorted(ended) == list(range(9))
    threads.close()


def test_urgent_work_waits_for_one_piece_of_idle_work_at_most() -> None:
    threads, gate, order = ReadThreads(1), threading.Event(), SimpleQueue()
    for n in range(5):
        threads.post_idle(lambda n=n: (gate.wait(5), order.put(f"idle {n}")))
    for n in range(5):
        threads.post(order.put, f"urgent {n}")
    gate.set()
    got = [order.get(timeout=5) for _ in range(10)]
    assert got[0] == "idle 0"
    assert got[1:6] == [f"urgent {n}" for n in range(5)]
    assert got[6:] == [f"idle {n}" for n in range(1, 5)]
    threads.close()


def test_dropped_idle_work_does_not_run_and_later_idle_work_does() -> None:
    threads, gate, ran = ReadThreads(2), threading.Event(), []
    threads.post_idle(gate.wait, 5)
    for n in range(50):
        threads.post_idle(ran.append, n)
    threads.drop_idle()
    gate.set()
    threads.drain()
    assert ran == []
    done = threading.Event()
    for _ in range(100):  # the hand-over between the last piece and the next must not be missed
        done.clear()
        threads.post_idle(done.set)
        assert done.wait(5)
    threads.close()


def reading() -> set[int | None]:
    """Read threads alive, of other tests' forgotten owners too."""
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith("expert-read")}


def test_threads_end_with_close_and_with_the_last_reference() -> None:
    before = reading()
    threads = ReadThreads(4)
    threads.submit(int).result(5)
    assert len(reading()) == len(before) + 4
    threads.close()
    assert reading() <= before
    with pytest.raises(RuntimeError, match="closed"):
        threads.post(int)
    forgotten = ReadThreads(4)
    forgotten.submit(int).result(5)
    del forgotten
    gc.collect()
    for _ in range(500):
        if reading() <= before:
            break
        time.sleep(0.01)
    assert reading() <= before


def test_a_thread_keeps_nothing_of_its_last_task() -> None:
    threads, buffer = ReadThreads(1), bytearray(10)
    view = memoryview(buffer)
    threads.post(len, view)
    threads.drain()
    time.sleep(0.01)
    view.release()
    buffer.extend(b"more")  # raises while anyone holds a view
    threads.close()


def test_whoever_waits_may_help_with_urgent_work_and_leaves_idle_work() -> None:
    threads, gate, begun, ran = ReadThreads(1), threading.Event(), threading.Event(), SimpleQueue()
    threads.post(lambda: (begun.set(), gate.wait(5)))
    begun.wait(5)
    for n in range(3):
        threads.post(lambda n=n: ran.put((n, threading.get_ident())))
    threads.post_idle(lambda: ran.put(("idle", threading.get_ident())))
    threads.help()
    assert [ran.get_nowait() for _ in range(3)] == [(n, threading.get_ident()) for n in range(3)]
    assert ran.empty()
    gate.set()
    name, where = ran.get(timeout=5)
    assert name == "idle"
    assert where != threading.get_ident()
    threads.close()
