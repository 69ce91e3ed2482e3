"""Numbers as people read them. GB is 10^9 bytes."""

from __future__ import annotations


def size(n: float) -> str:
    """Bytes with a unit and about three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= factor:
            value = n / factor
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return f"{n:.0f} B"
