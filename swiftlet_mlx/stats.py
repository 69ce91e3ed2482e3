"""Counters of what streaming did. Plain numbers: no clock of its own, no arrays, no output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class Stats:
    """Totals since the model was loaded. An expert counts once for each layer call that needs it.

    `reads` are read requests for one expert or for a run of neighbours; `read_bytes` counts section bytes, without
    padding; `guessed` experts were read before a layer asked for them, `foreseen` of them it then did ask for, and they
    count as misses, too; `wait_seconds` is the time the engine thread stood still for reads; `read_backs` are host
    synchronisations on a router's choice.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    reads: int = 0
    read_bytes: int = 0
    guessed: int = 0
    foreseen: int = 0
    read_backs: int = 0
    wait_seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that were resident, 1.0 if none was needed."""
        needed = self.hits + self.misses
        return self.hits / needed if needed else 1.0

    def copy(self) -> Stats:
        return Stats(**asdict(self))

    def since(self, earlier: Stats) -> Stats:
        """What was added after `earlier` was copied."""
        return Stats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
