"""How a number of bytes becomes slots. Arithmetic only: no arrays, no files, no operating system.

Invariant: the slots of all layers together never cost more than the budget they were split from.
"""

from __future__ import annotations

from collections.abc import Mapping

from .errors import BudgetTooSmall
from .layout import LayerTable
from .units import size

GB = 10**9


def minimum_bytes(tables: Mapping[int, LayerTable], top_k: int) -> int:
    """The smallest legal pool: one slot a layer, and in all at least one layer's choice for a token."""
    slots = [t.payload_bytes for t in tables.values()]
    return max(sum(slots), max(slots) * max(top_k, 1))


def cycle_bytes(tables: Mapping[int, LayerTable], top_k: int) -> int:
    """What one token touches. A smaller pool reads everything anew for every token."""
    return sum(t.payload_bytes * max(top_k, 1) for t in tables.values())


def all_bytes(tables: Mapping[int, LayerTable]) -> int:
    """What every expert of every layer takes; a larger pool has no use."""
    return sum(t.expert_count * t.payload_bytes for t in tables.values())


def split(tables: Mapping[int, LayerTable], budget: int, top_k: int) -> dict[int, int]:
    """Slots for each layer: equal bytes a layer, what is left over handed out one slot at a time.

    Args:
        tables: Layer to table.
        budget: Bytes for all slots together.
        top_k: Experts a token uses in a layer, 0 if unknown.

    Raises:
        BudgetTooSmall: naming the minimum.
    """
    need = minimum_bytes(tables, top_k)
    if budget < need:
        raise BudgetTooSmall(
            f"a cache of {size(budget)} does not hold one expert for each of {len(tables)} layers and "
            f"{max(top_k, 1)} of one layer; the minimum for this model is --cache-gb {_round_up(need)}, "
            f"one token touches {size(cycle_bytes(tables, top_k))}"
        )
    slots = {}
    left, layers = budget, len(tables)
    # layers with small experts first: what they cannot use is shared by the others
    for n, t in sorted(tables.items(), key=lambda item: item[1].expert_count * item[1].payload_bytes):
        slots[n] = max(1, min(t.expert_count, (left // layers) // t.payload_bytes))
        left -= slots[n] * t.payload_bytes
        layers -= 1
    while left < 0:  # one slot was forced on layers whose share was smaller: take from the richest
        n = max(slots, key=lambda n: slots[n] * tables[n].payload_bytes if slots[n] > 1 else 0)
        slots[n] -= 1
        left += tables[n].payload_bytes
    while True:
        fits = [n for n, t in tables.items() if slots[n] < t.expert_count and t.payload_bytes <= left]
        if not fits:
            return dict(sorted(slots.items()))
        for n in sorted(fits, key=lambda n: slots[n]):
            if tables[n].payload_bytes <= left:
                slots[n] += 1
                left -= tables[n].payload_bytes


def _round_up(n: int) -> str:
    """Bytes as GB with as few digits as keep it from being rounded below `n`."""
    for digits in range(1, 10):
        text = f"{n / GB:.{digits}f}"
        if float(text) * GB >= n and float(text) < 1.1 * n / GB:
            return text
        text = f"{float(text) + 10**-digits:.{digits}f}"
        if float(text) * GB >= n and float(text) < 1.1 * n / GB:
            return text
    return str(n / GB)
