"""Decode: what a token costs at several cache sizes, and where the time goes.

    python -m swiftlet_bench.decode MODEL --shares 0.1 0.25 0.5 1 --tokens 32 --rounds 3

Knows streamed models and their pools. The same tokens go through every size, sizes take turns, and every ratio is made
of times of one run: a step against the larger of its reads alone and its compute alone; the engine thread's own work
a streamed layer. Invariant: a measured step is one token through the whole model, its logits' argmax evaluated.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from swiftlet_mlx.config import for_mlx_lm, read_config, text_config
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.moe import Streamed
from swiftlet_mlx.pools import Pools
from swiftlet_mlx.qpack import CONFIG, DENSE
from swiftlet_mlx.reads import Reads
from swiftlet_mlx.stats import Stats

from .harness import Spread, ratio
from .lines import say, setting
from .prefill import empty

WARM_UP = 6  # steps before the first that counts: kernels are compiled, the pool holds what these tokens use


@dataclass(frozen=True, slots=True)
class Step:
    """One token. `cpu` is the engine thread's own time, without what it waits for."""

    seconds: float
    cpu: float
    wait: float
    hits: int
    misses: int
    read_backs: int
    read_bytes: int


def step(model: Any, cache: Any, token: int, pools: Pools | None) -> Step:
    """One token through a model."""
    before = pools.stats.copy() if pools is not None else Stats()
    start, cpu = time.perf_counter(), time.thread_time()
    mx.eval(mx.argmax(model(mx.array([[token]]), cache=cache)[:, -1], axis=-1))
    seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
    done = pools.stats.since(before) if pools is not None else Stats()
    return Step(seconds, cpu, done.wait_seconds, done.hits, done.misses, done.read_backs, done.read_bytes)


def in_turn(models: dict[Any, Any], tokens: Sequence[int], rounds: int) -> dict[Any, list[Step]]:
    """The same tokens through every model, token by token in turn, so that whatever disturbs the machine harms all
    alike. The first `WARM_UP` tokens of a round are not measured."""
    out: dict[Any, list[Step]] = {case: [] for case in models}
    for _ in range(rounds):
        caches = {case: make_prompt_cache(model) for case, model in models.items()}
        for n, token in enumerate(tokens):
            for case, model in models.items():
                done = step(model, caches[case], token, getattr(model, "pools", None))
                if n >= WARM_UP:
                    out[case].append(done)
    return out


def reads_alone(pools: Pools, misses: Sequence[int], seed: int = 0) -> float:
    """Seconds to read experts, layer after layer, with the threads and into the slots that a step uses, computing
    nothing.

    Args:
        pools: Of the model; they are empty afterwards.
        misses: How many experts of each layer.
        seed: Of which.
    """
    rng = random.Random(seed)
    empty(pools)
    seconds = 0.0
    for pool, n in zip(pools.layers.values(), misses, strict=True):
        if n and pool.direct:
            experts = rng.sample(range(pool.table.expert_count), min(n, pool.n_slots))
            reads = Reads(pool, [(e, slot) for slot, e in enumerate(experts)])
            start = time.perf_counter()
            for claim in reads.claims:
                pools.submit(reads.read, pools.source, *claim)
            while len(reads.results) < len(reads.claims):
                reads.done.get()
            seconds += time.perf_counter() - start
    empty(pools)
    return seconds


@contextmanager
def stock(folder: Path, model: Any) -> Iterator[Any]:
    """Stock mlx-lm on the weights of a container, all in memory; `model` has every expert resident."""
    weights = dict(mx.load(str(folder / DENSE)))  # type: ignore[arg-type]
    for path, module in model.named_modules():
        if isinstance(module, Streamed):
            weights |= {f"{path}.{name}": array for name, array in module.pool.arrays.items()}
    with TemporaryDirectory() as made:
        mx.save_safetensors(f"{made}/{DENSE}", weights, {"format": "mlx"})
        config = read_config(folder)
        (Path(made) / CONFIG).write_text(json.dumps({**config, **for_mlx_lm(config)}))
        del weights
        yield load_model(Path(made))[0]


def measure(
    folder: Path, shares: Sequence[float], n_tokens: int, rounds: int, threads: int, with_stock: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """Decode with every share of the experts resident, in turn.

    Args:
        folder: A container.
        shares: Of all experts, each a case.
        n_tokens: Measured in a round, after the first `WARM_UP`.
        rounds: Of all cases.
        threads: That read experts.
        with_stock: Also stock mlx-lm, on the weights of share 1.
        seed: Of the tokens.

    Returns:
        A row a case.
    """
    config = read_config(folder)
    vocab = int(text_config(config)["vocab_size"])
    tokens = random.Random(seed).choices(range(vocab), k=n_tokens + WARM_UP)
    models: dict[Any, Any] = {
        share: load_streamed(folder, cache_gb=_gb(folder, share), threads=threads)[0] for share in shares
    }
    for model in models.values():
        model.pools.alone, model.pools.foresight = True, None  # as in an engine that reads nothing ahead
    with stock(folder, models[1.0]) if with_stock else _nothing() as plain:
        out = in_turn({**models, **({"stock": plain} if plain is not None else {})}, tokens, rounds)
    rows = [_row(case, steps, models.get(case), out.get(1.0)) for case, steps in out.items()]
    for model in models.values():
        model.pools.close()
    return rows


def _row(case: Any, steps: Sequence[Step], model: Any, resident: Sequence[Step] | None) -> dict[str, Any]:
    seconds = sorted(s.seconds for s in steps)
    typical = median(seconds)
    row: dict[str, Any] = {
        "case": case, "n": len(steps), "tokens_per_second": 1 / typical, "step_seconds": typical,
        "p10_seconds": seconds[len(steps) // 10], "p90_seconds": seconds[len(steps) * 9 // 10],
    }  # fmt: skip
    if resident is not None:
        mine, theirs = (Spread(tuple(s.seconds for s in some)) for some in (steps, resident))
        row["over_resident"] = ratio(mine, theirs).median
    if model is None:
        return row
    pools, layers = model.pools, len(model.pools.layers)
    misses, hits = sum(s.misses for s in steps), sum(s.hits for s in steps)
    row |= {
        "slots": sum(p.n_slots for p in pools.layers.values()), "cache_bytes": pools.nbytes,
        "hit_rate": hits / (hits + misses) if hits + misses else 1.0, "misses": misses / len(steps),
        "read_bytes": sum(s.read_bytes for s in steps) / len(steps),
        "read_backs": median(s.read_backs for s in steps), "wait_seconds": median(s.wait for s in steps),
    }  # fmt: skip
    if resident is not None and row["read_backs"]:
        more = median(s.cpu - r.cpu for s, r in zip(steps, resident, strict=True))
        row["host_us_per_layer"] = 1e6 * more / layers
    if misses:
        a_step = round(misses / len(steps))
        each = [a_step // layers + (n < a_step % layers) for n in range(layers)]
        reads = row["reads_alone_seconds"] = median(reads_alone(pools, each, seed=n) for n in range(5))
        if resident is not None:
            row["over_bound"] = typical / max(reads, median(r.seconds for r in resident))
    return row


def _gb(folder: Path, share: float) -> float:
    """The budget that holds this share of the experts."""
    from swiftlet_mlx import memory
    from swiftlet_mlx.reader import open_source

    source, _ = open_source(folder)
    source.close()
    return max(share * memory.all_bytes(source.tables), memory.minimum_bytes(source.tables, 1)) / memory.GB


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure decode at several cache sizes and print JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m swiftlet_bench.decode", description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 1.0], help="of all experts")
    parser.add_argument("--tokens", type=int, default=32, help="measured in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--stock", action="store_true", help="also stock mlx-lm on the same weights; needs share 1")
    parser.add_argument("--output", type=Path, help="append the lines here, too")
    options = parser.parse_args(arguments)
    if options.stock and 1.0 not in options.shares:
        parser.error("--stock needs --shares ... 1")
    about = setting(options.model, threads=options.threads, tokens=options.tokens, rounds=options.rounds)
    rows = measure(
        options.model, options.shares, options.tokens, options.rounds, options.threads, with_stock=options.stock
    )
    for row in [about, *rows]:
        say(options.output, **row)


if __name__ == "__main__":
    main()
