"""How fast this disk gives experts: raw preads at random places, by read size and number of threads.

Needs no model: says what is possible here before 18 GB are downloaded. Knows one file and its bytes; no mlx. Reads go
through the page cache as the product's do; cold ones after the file's pages were dropped (Linux) or past the cache
(macOS, F_NOCACHE; not run here). Invariant: within one case no byte is read twice, so no case is served by itself.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from swiftlet_mlx.errors import DiskFull, ReadFailed

from .harness import Spread, in_turn
from .pagecache import forget

SIZES = (65_536, 262_144, 1_048_576, 1_769_472, 7_077_888)  # the last two: an expert of 35B and 80B, and of 397B
THREADS = (1, 4, 8, 16)
CASE_BYTES = 256 << 20  # read in one case: long enough to time, short enough for a slow disk
CASE_SECONDS = 2.0  # a case ends then, whatever is left
_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """What is varied."""

    read_bytes: int
    threads: int
    cold: bool

    @property
    def name(self) -> str:
        return f"{self.read_bytes} x{self.threads} {'cold' if self.cold else 'warm'}"


@dataclass(frozen=True, slots=True)
class Result:
    """What was found: bytes a second, and the seconds that half and nearly all single reads took."""

    case: Case
    bytes_per_second: Spread
    median_seconds: Spread
    p99_seconds: Spread


def measure(
    path: Path,
    *,
    sizes: Sequence[int] = SIZES,
    threads: Sequence[int] = THREADS,
    rounds: int = 3,
    states: Sequence[bool] = (True, False),
    case_bytes: int = CASE_BYTES,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[Result]:
    """Measure every combination, in turn.

    Args:
        path: A file with data (not a sparse one), larger than the largest read.
        sizes: Bytes of one read.
        threads: That read at once.
        rounds: Of all cases.
        states: True for cold, False for warm.
        case_bytes: Read in one case.
        progress: Called with runs done, runs in all, and the case.

    Raises:
        ReadFailed: the file is too short or cannot be read.
    """
    seed = count()
    found: dict[str, dict[str, Spread]] = {}
    done, total = 0, rounds * len(sizes) * len(threads) * len(states)
    cases: list[Case] = []
    for cold in states:  # one state after the other: macOS cannot forget what a warm case has read
        if not cold:
            _pass(path)  # warm means warm: the whole file once
        part = [Case(size, n, cold) for size in sizes for n in threads]
        found |= in_turn(
            {c.name: partial(_read, path, c, case_bytes, seed) for c in part},
            rounds,
            0,
            before_each=lambda name, cold=cold: forget(path) if cold else None,  # type: ignore[misc]
            progress=lambda n, _, what, before=done: progress(before + n, total, what),  # type: ignore[misc]
        )
        done += rounds * len(part)
        cases += part
    return [
        Result(c, *(found[c.name][key] for key in ("bytes_per_second", "median_seconds", "p99_seconds"))) for c in cases
    ]


def bandwidth(results: Sequence[Result], read_bytes: int, cold: bool = True) -> float:
    """Bytes a second for reads of about this size, with the number of threads that does best.

    Raises:
        ValueError: nothing was measured in that state.
    """
    fitting = [r for r in results if r.case.cold == cold]
    if not fitting:
        raise ValueError("no such measurement")
    nearest = min((r.case.read_bytes for r in fitting), key=lambda n: abs(n - read_bytes))
    return max(r.bytes_per_second.median for r in fitting if r.case.read_bytes == nearest)


@contextmanager
def sample_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """A temporary file of random bytes, flushed to the disk and deleted at the end.

    Raises:
        DiskFull: there is no room for it.
    """
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize
    if free < nbytes + (1 << 30):
        raise DiskFull(f"{folder}: {nbytes / 1e9:.1f} GB and 1 GB to spare are needed, {free / 1e9:.1f} GB are free")
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, _BLOCK, np.uint8)
    with NamedTemporaryFile(dir=folder, prefix="swiftlet-io-", suffix=".bin") as file:
        _past_the_cache(file.fileno(), True)  # or macOS would serve it from memory afterwards
        written = 0
        while written < nbytes:
            block[:8] = np.frombuffer(written.to_bytes(8, "little"), np.uint8)  # no two alike, should a disk compare
            written += file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _read(path: Path, case: Case, case_bytes: int, seeds: Iterator[int]) -> dict[str, float]:
    """One case once, at other places each time."""
    size = path.stat().st_size
    places = list(range(0, size - case.read_bytes + 1, case.read_bytes))
    if not places:
        raise ReadFailed(f"{path.name}: {size} bytes are too few for reads of {case.read_bytes}; give a larger file")
    random.Random(next(seeds)).shuffle(places)
    places = places[: max(case.threads, case_bytes // case.read_bytes)]
    return timed(path, places, case.read_bytes, case.threads, past_the_cache=case.cold)


def timed(
    path: Path, places: Sequence[int], read_bytes: int, threads: int, *, past_the_cache: bool, forget: bool = False
) -> dict[str, float]:
    """Read a file at these places and take the time.

    Args:
        path: The file.
        places: Byte offsets.
        read_bytes: At each.
        threads: That read at once.
        past_the_cache: On macOS, without using the page cache (F_NOCACHE).
        forget: On Linux, give the pages back after each read, as `--io direct` does.

    Raises:
        ReadFailed: the file is shorter than it was.
    """
    fd = os.open(path, os.O_RDONLY)
    times: list[float] = []
    give_back = getattr(os, "posix_fadvise", None) if forget else None
    try:
        _past_the_cache(fd, past_the_cache)
        end = time.perf_counter() + CASE_SECONDS
        failures: list[BaseException] = []

        def work(first: int) -> None:
            buffer = bytearray(read_bytes)
            try:
                for at in places[first::threads]:
                    start = time.perf_counter()
                    if os.preadv(fd, [buffer], at) != read_bytes:
                        raise ReadFailed(f"{path.name}: a short read at byte {at}; the file has changed")
                    if give_back is not None:
                        give_back(fd, at, read_bytes, os.POSIX_FADV_DONTNEED)
                    now = time.perf_counter()
                    times.append(now - start)
                    if now > end:
                        return
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - start
        if failures:
            raise failures[0]
    finally:
        os.close(fd)
    times.sort()
    return {
        "bytes_per_second": len(times) * read_bytes / seconds,
        "median_seconds": times[len(times) // 2],
        "p99_seconds": times[min(len(times) - 1, int(len(times) * 0.99))],
    }


def _past_the_cache(fd: int, cold: bool) -> None:
    """macOS cannot drop a file's pages, but can read past them (not run here)."""
    import fcntl

    flag = getattr(fcntl, "F_NOCACHE", None)
    if cold and flag is not None:
        fcntl.fcntl(fd, flag, 1)


def _pass(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(_BLOCK)
        while file.readinto(buffer):
            pass
