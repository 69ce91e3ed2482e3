"""Whether experts should go through the page cache: both ways of reading, in turn, on bytes that nobody has read yet.

Knows one file. What the cache keeps is read again for nothing, so `direct` has to be clearly faster on first reads to
be chosen. Invariant: no byte is read twice, so neither way is served by what the other has read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.reader import IO, IO_THREADS

from . import io, pagecache
from .harness import Spread, in_turn, ratio

# Public reports from Macs: F_NOCACHE made first reads 14 % faster to 3 times slower. Less gain than this is not worth
# doing without the page cache, which serves a third to all of later reads where there is memory to spare.
WORTH = 1.15


@dataclass(frozen=True, slots=True)
class Choice:
    """Bytes a second of first reads either way, and how many times as fast direct ones were, round by round."""

    cached: Spread
    direct: Spread
    direct_times: Spread

    @property
    def io(self) -> IO:
        """The way to read."""
        return "direct" if self.direct_times.low > 1 and self.direct_times.median >= WORTH else "cached"


def measure(path: Path, read_bytes: int, *, threads: int = IO_THREADS, rounds: int = 3) -> Choice:
    """Read different parts of a file both ways, in turn.

    Args:
        path: A file that is not in the page cache, of at least two reads a round.
        read_bytes: An expert's size.
        threads: That read at once.
        rounds: Of both ways.

    Raises:
        ReadFailed: the file is too short.
    """
    places = list(range(0, path.stat().st_size - read_bytes + 1, read_bytes))
    each = len(places) // (2 * rounds)
    if not each:
        raise ReadFailed(f"{path.name}: {2 * rounds} different reads of {read_bytes} bytes do not fit into it")
    random.Random(0).shuffle(places)
    left = iter(places)

    def once(direct: bool) -> dict[str, float]:
        mine = [next(left) for _ in range(each)]
        return io.timed(path, mine, read_bytes, threads, past_the_cache=direct, forget=direct)

    cases = {"cached": partial(once, False), "direct": partial(once, True)}
    found = in_turn(cases, rounds, 0, before_each=lambda name: pagecache.forget(path))
    cached, direct = (found[name]["bytes_per_second"] for name in ("cached", "direct"))
    return Choice(cached, direct, ratio(direct, cached))
