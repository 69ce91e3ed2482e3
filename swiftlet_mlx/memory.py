"""Memory: how large the slot pool is and how it is split over the layers, and MLX's own limits.

Knows numbers and the operating system's counters; holds no array. GB is 10^9 bytes.
Invariant: the slots of all layers together never cost more than the budget they were split from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from .checkpoint import Checkpoint
from .errors import BudgetTooSmall, OptionError
from .qpack import DENSE, Container, LayerTable
from .safetensors import read_header
from .units import size

GB = 10**9
# What MLX may keep of freed buffers. Enough to reuse a decode step's temporaries, and bounded: on a Mac the default
# grows without limit (reports of machines driven into swap).
MLX_CACHE_BYTES = 128 * 1024 * 1024


def limit_mlx_cache() -> None:
    """Bound what MLX keeps of freed buffers. To be called before the first weight is loaded."""
    mx.set_cache_limit(MLX_CACHE_BYTES)


def minimum_bytes(tables: Mapping[int, LayerTable], top_k: int) -> int:
    """The smallest legal pool: one slot a layer, and in all at least one layer's choice for a token."""
    slots = [t.payload_bytes for t in tables.values()]
    return max(sum(slots), max(slots) * max(top_k, 1))


def cycle_bytes(tables: Mapping[int, LayerTable], top_k: int) -> int:
    """What one token touches. A smaller pool reads everything anew for every token."""
    return sum(t.payload_bytes * max(top_k, 1) for t in tables.values())


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


def budget_bytes(cache_gb: float | None, tables: Mapping[int, LayerTable], top_k: int, dense_bytes: int) -> int:
    """The slot pool's bytes for a `cache_gb` option; None asks the machine.

    Raises:
        OptionError: for a number that is not positive and finite.
    """
    everything = sum(t.expert_count * t.payload_bytes for t in tables.values())
    if cache_gb is None:
        free = available_bytes() // 2 - dense_bytes
        return min(everything, max(free, minimum_bytes(tables, top_k)))
    if not 0 < cache_gb < 1e6:
        raise OptionError(f"--cache-gb {cache_gb} is not a size; give the slot pool in GB, for example --cache-gb 2")
    return min(everything, round(cache_gb * GB))


def dense_bytes(opened: Container | Checkpoint) -> int:
    """Bytes of the weights that stay resident."""
    if isinstance(opened, Container):
        return sum(t.nbytes for t in read_header(opened.path / DENSE).tensors.values())
    return sum(at.info.nbytes for at in opened.dense.values())


def available_bytes() -> int:
    """Memory that this process may take: the system's free memory or a control group's limit, whichever is less."""
    if sys.platform == "linux":
        return min(_meminfo("MemAvailable"), _cgroup_left())
    # macOS: physical memory, of which the system and other programs keep a part (not run here)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.75)


def _meminfo(key: str, path: Path = Path("/proc/meminfo")) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Limit of the control group less what is in use and cannot be reclaimed (cgroup v2)."""
    try:
        limit = (root / "memory.max").read_text().strip()
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return 1 << 62 if limit == "max" else int(limit) - int(stat["anon"])
    except (OSError, ValueError, KeyError):
        return 1 << 62


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
