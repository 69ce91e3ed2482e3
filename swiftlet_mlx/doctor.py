"""Whether streaming works on this machine: what cannot be tested elsewhere, asked of the device itself.

Knows MLX, the slots and a small model; prints nothing. A finding is `ok`, `warn` (it works, with a remark), `wrong` (do
not use it like this) or `skipped`. Invariant: every check leaves the default device and the process's limits as they
were, and none raises for what it was made to find.
"""

from __future__ import annotations

import gc
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from . import memory, oracle
from .config import ModelConfig, read_config
from .device import backend
from .errors import SwiftletError
from .layout import make_table
from .loader import load_streamed
from .machine import Pressure, pressure
from .moe import Streamed
from .qpack import Container
from .reader import open_source
from .slots import SlotPool
from .unpack import unpack

Verdict = Literal["ok", "warn", "wrong", "skipped"]

TESTED = {"mlx": ((0, 32, 2), (0, 33)), "mlx-lm": ((0, 32, 2), (0, 33))}
PROMPT = (1, 5, 9, 42, 7, 99, 3, 17, 64, 2)
# On a GPU kernels differ with the number of rows, so the last bits may: in bfloat16 an eighth of a logit near 20. An
# expert's wrong bytes move logits by whole units.
GPU_TOLERANCE = 1.0
REPORT = "please report this with the block below; answers cannot be trusted here"
FILES_NEEDED = 256
EVERYTHING_GB = 1e5  # more than any model's experts


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found. `advice` says what to do, where something is to be done."""

    name: str
    verdict: Verdict
    said: str
    advice: str = ""


def devices() -> list[mx.Device]:
    """The devices MLX has here: the CPU, and a GPU if there is one."""
    return [mx.Device(mx.cpu), *([mx.Device(mx.gpu)] if mx.is_available(mx.Device(mx.gpu)) else [])]


def check_versions() -> Finding:
    """Whether this is the MLX that the project was tested with."""
    found = {name: version(name) for name in TESTED}
    said = ", ".join(f"{name} {v}" for name, v in found.items())
    said += f", Python {platform.python_version()}, {platform.system()} {platform.machine()}, computing on {backend()}"
    for name, (least, below) in TESTED.items():
        numbers = tuple(int(part) for part in found[name].split(".")[:3] if part.isdigit())
        if not least <= numbers < below:
            wanted = ".".join(map(str, least))
            return Finding("versions", "warn", said, f"not tested; `pip install '{name}>={wanted},<0.33'`")
    if sys.platform == "darwin" and backend() == "cpu":
        return Finding("versions", "wrong", said, "MLX sees no GPU; is this Python built for arm64?")
    return Finding("versions", "ok", said)


def check_host_writes(device: mx.Device, rounds: int = 50) -> Finding:
    """Whether the device sees bytes that the host writes into an array's memory, every time."""
    name = f"host writes, {_name(device)}"
    with _on(device):
        pool = SlotPool(make_table(0, 4, {"gate_proj.weight": ("U32", (64, 128))}), 4)
        if not pool.direct:
            return Finding(
                name,
                "warn",
                "the device does not see host writes",
                "experts are copied on their way in, which is slower",
            )
        array = pool.arrays["gate_proj.weight"]
        for n in range(rounds):
            for slot in range(4):
                pool.rows(slot)[0][:] = bytes([(n * 4 + slot) % 251]) * (64 * 128 * 4)
            sums = cast("list[int]", mx.sum(array.view(mx.uint8), axis=(1, 2)).tolist())
            if sums != [(n * 4 + slot) % 251 * 64 * 128 * 4 for slot in range(4)]:
                return Finding(name, "wrong", f"round {n} of {rounds}: the device computed with old bytes", REPORT)
    return Finding(name, "ok", f"{rounds} rounds of writes, all seen")


def check_slot_reuse(folder: Path, device: mx.Device, n_tokens: int = 200) -> Finding:
    """Whether a model with few slots, each overwritten all the time, says what it says with every expert in memory.

    On the CPU with the fewest slots there can be. On a GPU with as many as one token needs: with fewer, experts are
    computed in waves, whose kernels may round otherwise.
    """
    name = f"slot reuse, {_name(device)}"
    with _on(device):
        few, n_slots = _greedy(folder, _smallest_gb(folder, waves=_is_cpu(device)), n_tokens)
        every, _ = _greedy(folder, EVERYTHING_GB, n_tokens)
        differs = _first_difference(few, every)
        if differs is None:
            return Finding(name, "ok", f"{n_tokens} tokens with {n_slots} slots, the same as with all")
        if _first_difference(every, _greedy(folder, EVERYTHING_GB, n_tokens)[0]) is not None:
            return Finding(
                name, "warn", "this device does not say the same twice, even with every expert in memory",
                "answers are as good as mlx-lm's here, and as little repeatable",
            )  # fmt: skip
    return Finding(name, "wrong", f"token {differs} of {n_tokens} differs between {n_slots} slots and all", REPORT)


def check_oracle(folder: Path, device: mx.Device, n_tokens: int = 48) -> Finding:
    """Whether a container answers as stock mlx-lm does on the same weights, with the fewest slots."""
    name = f"oracle, {_name(device)}"
    source, opened = open_source(folder)
    source.close()
    with _on(device), TemporaryDirectory() as scratch:
        stock = folder
        if isinstance(opened, Container):
            model, _ = load_streamed(folder)
            modules = {m.layer: path for path, m in model.named_modules() if isinstance(m, Streamed)}
            _forget(model)
            stock = unpack(opened, modules, Path(scratch) / "checkpoint")
        found = oracle.compare(folder, stock, PROMPT, n_tokens=n_tokens, cache_gb=_smallest_gb(folder))
    return judge_oracle(name, found, exactly=_is_cpu(device))


def judge_oracle(name: str, found: oracle.Comparison, exactly: bool) -> Finding:
    """What a comparison with stock mlx-lm means.

    Args:
        name: Of the check.
        found: By the oracle.
        exactly: Whether every bit must be equal, as on the CPU; else every token, or nearly the same logits.
    """
    n, layers, most = len(found.ids), len(found.layers), max(found.logits, *found.layers)
    if found.exact and found.agrees:
        return Finding(name, "ok", f"{n} tokens and all {layers} layers equal to stock mlx-lm, bit by bit")
    said = f"logits differ from stock mlx-lm by up to {found.logits:.3g}, layers by up to {most:.3g}"
    if not exactly and found.agrees:
        return Finding(name, "ok", f"{n} tokens as stock mlx-lm; {said}, as kernels for other shapes round")
    if found.first_difference is not None:
        said += f"; token {found.first_difference} is another"
    if not exactly and found.logits < GPU_TOLERANCE:
        return Finding(name, "warn", said, "two tokens were nearly equally likely; run it again with another model")
    return Finding(name, "wrong", said, REPORT)


def check_memory() -> Finding:
    """What is free, what MLX may take, how many files may be open."""
    free = memory.available_bytes()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    said = f"{free / 1e9:.1f} GB free"
    if backend() == "metal":  # not run here
        working_set = int(mx.device_info().get("max_recommended_working_set_size", 0))
        said += f", Metal recommends at most {working_set / 1e9:.1f} GB"
    said += f", {files} files may be open"
    if pressure() is not Pressure.NORMAL:
        return Finding("memory", "warn", f"{said}; memory is short now", "close other programs before you measure")
    if 0 <= files < FILES_NEEDED:
        return Finding("memory", "warn", said, f"`ulimit -n {FILES_NEEDED}` before the command")
    return Finding("memory", "ok", said)


def run(check: Callable[[], Finding], name: str) -> Finding:
    """A check's finding; an error of its own is one, too."""
    try:
        return check()
    except (SwiftletError, RuntimeError, OSError, MemoryError) as error:
        return Finding(name, "wrong", f"{type(error).__name__}: {error}", "please report this with the block below")


def _greedy(folder: Path, cache_gb: float, n_tokens: int) -> tuple[Sequence[int], int]:
    """Tokens that follow the prompt, which is fed token by token as well, and the number of slots."""
    model, _ = load_streamed(folder, cache_gb=cache_gb)
    cache, out = make_prompt_cache(model), list(PROMPT)
    for n in range(len(PROMPT) + n_tokens - 1):
        logits = model(mx.array([[out[n]]]), cache=cache)[0, -1]
        token = cast("int", mx.argmax(logits).item())  # host synchronisation
        if n >= len(PROMPT) - 1:
            out.append(token)
    n_slots = sum(pool.n_slots for pool in model.pools.layers.values())
    _forget(model)
    return out[len(PROMPT) :], n_slots


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def _smallest_gb(folder: Path, waves: bool = True) -> float:
    """The least memory for experts: at all, or without computing one token's experts in waves."""
    source, _ = open_source(folder)
    source.close()
    shape = ModelConfig.from_dict(read_config(folder), str(folder))
    least = memory.minimum_bytes if waves else memory.cycle_bytes
    return (least(source.tables, shape.top_k) + 1) / memory.GB


def _forget(model: nn.Module) -> None:
    model.pools.close()
    del model
    gc.collect()
    mx.clear_cache()


@contextmanager
def _on(device: mx.Device) -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(device)
    try:
        yield
    finally:
        mx.set_default_device(before)


def _is_cpu(device: mx.Device) -> bool:
    return device == mx.Device(mx.cpu)


def _name(device: mx.Device) -> str:
    if _is_cpu(device):
        return "CPU"
    return "GPU (Metal)" if mx.metal.is_available() else "GPU (CUDA)"
