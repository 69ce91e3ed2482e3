"""A saved conversation: one safetensors file with messages, token ids and caches.

Knows files and caches; no engine. Reading and writing of arrays belongs on the engine thread. Invariants: a
file appears under its name only when it is whole (written beside it, synced, renamed). Nothing of a file is
used before its header, its hash and its model have been checked.

Layout: arrays named `live.L.PATH` (the caches of layer L at the last token) and `mark.N.L.PATH` (a
checkpoint's copies), PATH being mlx's flattened path in the cache's `state`. The metadata key
`swiftlet_session` holds JSON: version, model, messages, ids, turn, marks (offsets), live and states (per
layer: values that are not arrays), sha256 (of all array bytes in the order of their names). The metadata key
`sha256` holds the hash of that JSON text.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from .errors import SafetensorsError, SessionFileError, WrongModel
from .safetensors import read_header
from .timeline import Checkpoint, Timeline
from .whole import whole

VERSION = 2
KEY, SEAL = "swiftlet_session", "sha256"
SMALL_BYTES = 65_536  # parameters up to this size (norms, router biases) are hashed in full
SAMPLE = 256  # numbers from the beginning and from the end of any larger one


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file says apart from its arrays."""

    path: Path
    model: str
    messages: list[dict[str, Any]]
    record: Mapping[str, Any]


def fingerprint(model: nn.Module, extra: Any = None) -> str:
    """A name for a model's weights, the same wherever and however they are loaded.

    Hashes the name, shape and type of every resident parameter, the bytes of the small ones and samples of the
    large ones. On the engine thread.

    Args:
        model: a loaded model.
        extra: what else tells two models apart (how the experts are quantised), as JSON values.
    """
    digest = hashlib.sha256(json.dumps(extra, sort_keys=True, default=str).encode())
    named = sorted(cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())), key=lambda pair: pair[0])
    looked_at = [array if array.nbytes <= SMALL_BYTES else _sampled(array) for _, array in named]
    mx.eval(looked_at)
    for (name, array), part in zip(named, looked_at, strict=True):
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
        digest.update(_bytes(part))
    return digest.hexdigest()


def _sampled(array: mx.array) -> mx.array:
    """A small copy, so that a large array is neither moved nor copied."""
    row = array[0] if array.ndim > 1 else array
    end = array[-1] if array.ndim > 1 else array
    return mx.concatenate([row.reshape(-1)[:SAMPLE], end.reshape(-1)[-SAMPLE:]])


def write(path: Path, messages: Sequence[Mapping[str, Any]], model: str, timeline: Timeline | None) -> None:
    """Save a conversation. On the engine thread.

    Args:
        path: where to; an older file is replaced as a whole or not at all.
        messages: the conversation.
        model: `fingerprint` of its model.
        timeline: what has been read of it; None saves the messages alone.

    Raises:
        SessionFileError: the file cannot be written.
    """
    arrays: dict[str, mx.array] = {}
    record: dict[str, Any] = {"version": VERSION, "model": model, "messages": list(messages), "ids": []}
    if timeline is not None:
        record |= {"ids": timeline.ids, "turn": timeline.turn}
        record["live"] = [_flat(arrays, f"live.{i}", c.state) for i, c in enumerate(timeline.caches)]
        record["marks"] = [
            {
                "offset": mark.offset,
                "states": [_flat(arrays, f"mark.{n}.{i}", s) for i, s in enumerate(mark.states)],
            }
            for n, mark in enumerate(timeline.checkpoints)
        ]
    arrays = arrays or {"empty": mx.zeros((1,), dtype=mx.uint8)}
    mx.eval(list(arrays.values()))
    record["sha256"] = _hash(arrays)
    text = json.dumps(record)
    try:
        with whole(path, ".safetensors") as new:
            mx.save_safetensors(str(new), arrays, {KEY: text, SEAL: _seal(text)})
    except (OSError, RuntimeError) as error:
        why = _too_little_room(path, sum(a.nbytes for a in arrays.values()) + len(text))
        why = why or getattr(error, "strerror", None) or f"{str(error).rstrip('.')} (is the disk full?)"
        raise SessionFileError(f"The conversation cannot be saved to {path}: {why}.") from error


def read(path: Path) -> Saved:
    """What a file says, its arrays left alone.

    Raises:
        SessionFileError: it is not a saved conversation, or it is damaged.
    """
    if not path.is_file():
        raise SessionFileError(f"{path} is no file." if path.exists() else f"There is no file {path}.")
    try:
        header = read_header(path)
        text, told = header.metadata[KEY], header.metadata.get(SEAL)
        if told is not None and told != _seal(text):
            raise ValueError("what it says does not match its hash")
        record = json.loads(text)
        version = record["version"]
        if version != VERSION:
            raise SessionFileError(
                f"{path} is a conversation of version {version}; this program reads version {VERSION}. Use the "
                "program that saved it, or a newer one."
            )
        if told is None:
            raise ValueError("it has no hash")
        messages = record["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise TypeError("messages")
        return Saved(path, str(record["model"]), messages, record)
    except OSError as error:
        raise SessionFileError(f"{path} cannot be read: {error.strerror}.") from error
    except SafetensorsError as error:
        raise SessionFileError(f"{path} is not a saved conversation, or it is damaged.") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SessionFileError(f"{path} is not a saved conversation, or it is damaged ({error}).") from error


def restore(saved: Saved, model: nn.Module, name: str) -> Timeline | None:
    """The caches of a file. On the engine thread.

    Args:
        saved: what `read` returned.
        model: the loaded model.
        name: its `fingerprint`.

    Returns:
        The timeline, evaluated, or None if the file holds none.

    Raises:
        WrongModel: the file belongs to another model.
        SessionFileError: the arrays are damaged.
    """
    if saved.model != name:
        raise WrongModel(
            f"{saved.path} was saved with another model ({saved.model[:12]}; this one is {name[:12]}). Open it with "
            "the model it belongs to."
        )
    record = saved.record
    try:
        arrays = cast("dict[str, mx.array]", mx.load(str(saved.path), format="safetensors"))
        mx.eval(list(arrays.values()))
        if _hash(arrays) != record["sha256"]:
            raise ValueError("its bytes do not match its hash")
        if not record["ids"]:
            return None
        fresh = make_prompt_cache(model)
        caches = [
            type(cache).from_state(_tree(arrays, f"live.{i}", rest))
            for i, (cache, rest) in enumerate(zip(fresh, record["live"], strict=True))
        ]
        timeline = Timeline(caches)
        timeline.fed(record["ids"])
        timeline.turn = record["turn"]
        for n, mark in enumerate(record["marks"]):
            states = tuple(
                None if rest is None else _tree(arrays, f"mark.{n}.{i}", rest) for i, rest in enumerate(mark["states"])
            )
            timeline.checkpoints.append(Checkpoint(mark["offset"], states))
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, OverflowError) as error:
        raise SessionFileError(
            f"{saved.path} is damaged: {error}. Its messages can still be read; start a new session with them."
        ) from error
    return timeline


def _flat(arrays: dict[str, mx.array], prefix: str, state: Any) -> list[list[Any]] | None:
    """Put a state's arrays under their names, return [path, value] for the rest; None for no state."""
    if state is None:
        return None
    rest = []
    for key, leaf in cast("list[tuple[str, Any]]", tree_flatten(state)):
        if isinstance(leaf, mx.array):
            arrays[f"{prefix}.{key}"] = mx.contiguous(leaf)
        else:
            rest.append([key, leaf])
    return rest


def _tree(arrays: Mapping[str, mx.array], prefix: str, rest: Sequence[Sequence[Any]]) -> Any:
    start = prefix + "."
    leaves = [(k.removeprefix(start), a) for k, a in arrays.items() if k.startswith(start)]
    return tree_unflatten([*leaves, *((key, value) for key, value in rest)])


def _seal(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _too_little_room(path: Path, needed: int) -> str:
    """What MLX does not say when a disk is full; nothing if it is not."""
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        return ""
    return f"no space left ({needed} bytes are needed, {free} are free)" if free < needed else ""


def _hash(arrays: Mapping[str, mx.array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} {arrays[name].dtype}\n".encode())
        digest.update(_bytes(arrays[name]))
    return digest.hexdigest()


def _bytes(array: mx.array) -> memoryview | bytes:
    """The bytes of an evaluated array, without a copy where it is contiguous."""
    if array.size == 0:
        return b""
    flat = mx.contiguous(array)
    mx.eval(flat)
    return memoryview(flat).cast("B")  # type: ignore[arg-type]
