"""The hot list: which experts a model's owner really uses, kept from run to run, read in the background at a start.

Knows counts, a small file, and how to name a model by its bytes; reads no expert itself. Invariant: a hot list only
ever costs a read: one that is missing, damaged, too large or another model's is no list.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from .errors import SwiftletError
from .jsonfile import object_if_there
from .pools import Pools
from .whole import whole

VERSION = 1
MAX_BYTES = 2_000_000
PER_LAYER = 256  # experts remembered: all of a 35B layer, half of an 80B one

Uses = dict[int, dict[int, int]]  # layer to expert to how often it was used

# What tells one model from another, as far as it is there: each names the bytes of all files, or their sizes.
_NAMES = ("hashes.json", "manifest.json", "model.safetensors.index.json", "config.json")


def model_hash(folder: Path) -> str:
    """A name for the weights in a folder, from its small files and the sizes of the large ones."""
    digest = hashlib.sha256()
    for name in _NAMES:
        path = folder / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
    return digest.hexdigest()


def read(path: Path, model: str) -> Uses:
    """The counts in a file, empty if there are none for this model.

    Args:
        path: of the hot list.
        model: `model_hash` of the model.
    """
    try:
        found = object_if_there(path, SwiftletError, limit=MAX_BYTES) or {}
        if found.get("version") != VERSION or found.get("model") != model:
            return {}
        return {int(n): {int(e): int(c) for e, c in layer.items()} for n, layer in found["uses"].items()}
    except (SwiftletError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(path: Path, model: str, uses: Uses) -> None:
    """Store counts, whole or not at all.

    Args:
        path: of the hot list; its folder is made.
        model: `model_hash` of the model.
        uses: the counts, of which the largest are kept.

    Raises:
        OSError: the folder cannot be written.
    """
    kept = {n: dict(sorted(layer.items(), key=lambda item: -item[1])[:PER_LAYER]) for n, layer in uses.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as new:
        new.write_text(json.dumps({"version": VERSION, "model": model, "uses": kept}, separators=(",", ":")))


def learned(pools: Pools, before: Mapping[int, Mapping[int, int]]) -> Uses:
    """What this run used, and half of what was known before it, so that old habits fade."""
    uses: Uses = {}
    for n, pool in pools.layers.items():
        now, old = pool.policy.uses, before.get(n, {})
        uses[n] = {e: c for e in {*now, *old} if (c := now.get(e, 0) + old.get(e, 0) // 2) > 0}
    return uses


def start(pools: Pools, uses: Mapping[int, Mapping[int, int]]) -> None:
    """Begin to read the experts used most, as many as there are free slots. On the thread that owns the model."""
    wanted = {}
    for n, pool in pools.layers.items():
        layer = uses.get(n, {})
        wanted[n] = [e for e in sorted(layer, key=lambda e: -layer[e]) if 0 <= e < pool.table.expert_count]
    pools.prefetch(wanted)
