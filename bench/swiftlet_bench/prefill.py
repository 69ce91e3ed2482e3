"""How fast a prompt is read: tokens a second and bytes, beside what limits it.

    python -m swiftlet_bench.prefill MODEL --lengths 128,512,2048 --cache-gb 2

For each length, in one process: a streamed prefill with an empty pool (every expert it needs is read), one more with
the pool it leaves, and the time to the first token. Beside them the two bounds: one sequential pass over the same
bytes with the same reader, and the same prompt with every expert resident (`--resident`, if memory allows), both by
mlx-lm's own path and layer-major. Ratios are taken inside one run. Prints one JSON object a line to stdout.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from swiftlet_mlx import context
from swiftlet_mlx.delta import use_chunked_delta
from swiftlet_mlx.layer_major import part_of, use_layer_major, use_stock_layers
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.pools import Pools
from swiftlet_mlx.prefill import prefill
from swiftlet_mlx.slots import EMPTY

from . import pagecache
from .lines import say, setting

MLX_LM_STEP = 2048  # tokens a pass in mlx-lm's own prefill


def prompt(n: int, vocab: int, seed: int = 0) -> list[int]:
    """Random token ids: with random weights no text is more natural, and a router spreads them the most."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, n)]


def measure(model: Any, tokens: list[int]) -> dict[str, Any]:
    """One prefill of all tokens but the last, then the last one, as generation does.

    Args:
        model: streamed; its pools are used as they are.
        tokens: at least two.

    Returns:
        Seconds, tokens a second, reads and peak memory.
    """
    before = model.pools.stats.copy()
    mx.reset_peak_memory()
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    prefill(model, tokens[:-1], cache)
    middle = time.perf_counter()
    after = model.pools.stats.copy()
    mx.eval(model(mx.array([tokens[-1:]]), cache=cache)[:, -1].argmax())
    end = time.perf_counter()
    done = after.since(before)
    return {
        "tokens": len(tokens),
        "seconds": middle - start,
        "tokens_per_second": (len(tokens) - 1) / (middle - start),
        "ttft_seconds": end - start,
        "read_bytes": done.read_bytes,
        "reads": done.reads,
        "misses": done.misses,
        "hits": done.hits,
        "wait_seconds": done.wait_seconds,
        "mlx_peak_bytes": mx.get_peak_memory(),
    }


def through_decode_path(model: Any, tokens: list[int], step: int) -> float:
    """Tokens a second when the prompt goes through the decode path `step` tokens at a time."""
    parts = use_stock_layers(model)
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    for at in range(0, len(tokens) - 1, step):
        model(mx.array([tokens[at : min(at + step, len(tokens) - 1)]]), cache=cache)
        mx.eval([c.state for c in cache])
    seconds = time.perf_counter() - start
    if parts:
        use_layer_major(model)
    return (len(tokens) - 1) / seconds


def one_pass(pools: Pools, share: float = 1.0) -> dict[str, float]:
    """Read experts layer by layer into a pool's slots, with the pool's threads, computing nothing.

    Args:
        pools: of the model; it is empty afterwards.
        share: how much of each layer's experts to read.

    Returns:
        Seconds and bytes.
    """
    empty(pools)
    start, total = time.perf_counter(), 0
    for layer, pool in pools.layers.items():
        rows = [pool.rows(slot) for slot in range(pool.n_slots)]
        count = int(pool.table.expert_count * share)
        run = max(1, min(4, pool.n_slots // 8))

        def read(first: int, layer: int = layer, rows: Any = rows, count: int = count, run: int = run) -> int:
            views = [rows[(first + i) % len(rows)] for i in range(min(run, count - first))]
            return pools.source.read(layer, first, views)

        futures = [pools.submit(read, first) for first in range(0, count, run)]
        wait(futures)
        total += sum(f.result() for f in futures)
    return {"seconds": time.perf_counter() - start, "bytes": float(total)}


def empty(pools: Pools) -> None:
    """Forget every resident, so that the next prompt reads all it needs."""
    for pool in pools.layers.values():
        while pool.policy.residents:
            expert = pool.policy.evict()
            pool.settle(expert, pool.slots[expert], ok=False)
            pool.slots[expert] = EMPTY


def resident(folder: Path, lengths: list[int], *, chunked: bool) -> list[dict[str, Any]]:
    """The same prompts with every expert in memory: by mlx-lm's own path in its own steps, and layer-major."""
    model: Any = load_streamed(folder, cache_gb=1e5)[0]
    if chunked:
        use_chunked_delta(model)
    out = []
    for n in lengths:
        tokens = prompt(n, context.stated(model, "vocab_size") or 0)
        prefill(model, tokens[:-1], make_prompt_cache(model))  # compiles kernels, moves pages
        layer_major = measure(model, tokens)
        stock = through_decode_path(model, tokens, MLX_LM_STEP)
        out.append(
            {
                "case": "resident",
                "tokens": n,
                "layer_major_tokens_per_second": layer_major["tokens_per_second"],
                "mlx_lm_tokens_per_second": stock,
                "mlx_peak_bytes": layer_major["mlx_peak_bytes"],
            }
        )
    model.pools.close()
    return out


def run(argv: list[str] | None = None) -> None:
    """Measure as the arguments say and print JSON lines."""
    parser = argparse.ArgumentParser(prog="swiftlet_bench.prefill", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default="128,512,2048", help="prompt lengths in tokens, comma separated")
    parser.add_argument("--cache-gb", type=float, default=2.0)
    parser.add_argument("--cold", action="store_true", help="drop the container from the page cache first (Linux)")
    parser.add_argument("--resident", action="store_true", help="also with every expert in memory")
    parser.add_argument("--chunked-delta", action="store_true", help="chunked DeltaNet on the CPU, too")
    parser.add_argument("--decode-step", type=int, default=0, help="also through the decode path, so many at a time")
    args = parser.parse_args(argv)
    lengths = [int(n) for n in args.lengths.split(",")]

    bounds = resident(args.model, lengths, chunked=args.chunked_delta) if args.resident else []
    for bound in bounds:
        say(**bound)
    model: Any = load_streamed(args.model, cache_gb=args.cache_gb)[0]
    if args.chunked_delta:
        use_chunked_delta(model)
    about = setting(
        args.model, cache_bytes=model.pools.nbytes, slots=next(iter(model.pools.layers.values())).n_slots,
        layers=len(model.layers), layer_major=sum(part_of(layer) is not None for layer in model.layers),
    )  # fmt: skip
    say(**about)

    def make_cold() -> None:
        for path in pagecache.files(args.model) if args.cold else ():
            pagecache.forget(path)

    make_cold()
    sequential = one_pass(model.pools)
    sequential = sequential if args.cold else one_pass(model.pools)
    say(case="one pass", bytes_per_second=sequential["bytes"] / sequential["seconds"], **sequential)
    for n in lengths:
        tokens = prompt(n, context.stated(model, "vocab_size") or 0)
        empty(model.pools)
        prefill(model, tokens[:-1], make_prompt_cache(model))  # compiles kernels
        for pool_state in ("empty", "warm"):
            if pool_state == "empty":
                empty(model.pools)
            make_cold()
            got = measure(model, tokens)
            reading = sequential["seconds"] * got["read_bytes"] / sequential["bytes"]
            ratios = {"seconds_over_one_pass": got["seconds"] / reading if reading else None}
            ratios["read_time_hidden"] = 1 - got["wait_seconds"] / reading if reading else None
            for bound in bounds:
                if bound["tokens"] == n:
                    speed = bound["layer_major_tokens_per_second"]
                    ratios["speed_over_resident"] = got["tokens_per_second"] / speed
                    ratios["seconds_over_bound"] = got["seconds"] / max(reading, (n - 1) / speed)
            say(case="streamed", pool=pool_state, **got, **ratios)
        if args.decode_step:
            empty(model.pools)
            say(case="decode path", tokens=n, tokens_per_second=through_decode_path(model, tokens, args.decode_step))
    model.pools.close()


if __name__ == "__main__":
    run(sys.argv[1:])
