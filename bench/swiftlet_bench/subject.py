"""One model under measurement, run as a user runs it: through the engine, greedily, token by token.

Knows the engine, the counters and this process's memory; no output. Invariants: end tokens do not end a run, so every
run generates exactly as many tokens as asked; counters are read on the engine thread between two tokens; the model's
memory is this process's, so one subject a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from swiftlet_mlx import context
from swiftlet_mlx.config import for_mlx_lm, read_config
from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import EngineFailed, OptionError, SwiftletError
from swiftlet_mlx.events import Event, Finish, FinishReason, Statistics
from swiftlet_mlx.generation import Request
from swiftlet_mlx.loader import has_tokenizer, load_streamed, load_text
from swiftlet_mlx.reader import IO, IO_THREADS
from swiftlet_mlx.stats import Stats

from . import conditions, machine, pagecache, process, prompts
from .harness import Setting, model_hash
from .synthetic import is_synthetic

if TYPE_CHECKING:
    from swiftlet_mlx.generation import Token

FIRST_TOKENS = 8  # told apart: the pool still holds what the prompt used


@dataclass(slots=True)
class Clock:
    """A consumer of tokens that notes when they came, what the counters said, and what MLX had allocated."""

    counters: Callable[[], Stats]
    times: list[float] = field(default_factory=list)
    at: list[Stats] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    thinking_tokens: int = 0

    def token(self, token: Token) -> tuple[Sequence[Event], FinishReason | None]:
        self.times.append(time.perf_counter())
        self.at.append(self.counters())
        self.active.append(mx.get_active_memory())
        return (), None

    def finish(self, reason: FinishReason) -> tuple[Sequence[Event], Finish]:
        return (), Finish(reason)


class Subject:
    """A loaded model. Made by `opened`."""

    def __init__(
        self, engine: Engine, folder: Path, threads: int, io: str, load_seconds: float, page_cache: str
    ) -> None:
        self.engine, self.folder = engine, folder
        self.threads, self.io = threads, io
        self.load_seconds, self.page_cache = load_seconds, page_cache
        self.load_peak_bytes = process.peak_bytes()
        self.config = read_config(folder)
        self.vocab = context.stated(engine.model, "vocab_size") or 0
        self.pools = getattr(engine.model, "pools", None)
        self.last_ids: tuple[int, ...] = ()

    def prompt(self, n: int, seed: int = 0) -> list[int]:
        """A prompt that suits the model: text, or random ids where there is no tokenizer or no sense."""
        tokenizer = None if is_synthetic(self.config) else self.engine.tokenizer
        return prompts.ids(n, self.vocab, tokenizer, seed)

    def run(self, prompt: Sequence[int], n_tokens: int) -> dict[str, float]:
        """Read a prompt and generate.

        Args:
            prompt: Token ids.
            n_tokens: Generated whatever they are; 1 measures the prompt alone.

        Returns:
            Seconds, rates and counters under fixed names; see README.md. Rates a token are over the tokens after the
            first, which belongs to the prompt.
        """
        process.reset_peak()
        mx.reset_peak_memory()
        used = process.cpu_seconds()
        watch = conditions.Watch()
        before = self._counters()
        clock = Clock(self._counters)
        stream = self.engine.submit(Request(ids=tuple(prompt), consumer=clock, max_tokens=n_tokens))
        statistics = next(event for event in stream if isinstance(event, Statistics))
        self.last_ids = statistics.ids
        first = clock.at[0].since(before)
        values = {
            "ttft_seconds": statistics.ttft_seconds,
            "prefill_tokens_per_second": statistics.prefill_tokens_per_second,
            "prefill_read_bytes": first.read_bytes,
            "prefill_reads": first.reads,
            "prefill_wait_seconds": first.wait_seconds,
            "peak_bytes": process.peak_bytes(),
            "mlx_peak_bytes": mx.get_peak_memory(),
            "mlx_active_bytes": mx.get_active_memory(),
            "cpu_seconds": process.cpu_seconds() - used,
            "generated_tokens": statistics.generated_tokens,
        }
        if n_tokens > 1:
            values |= _decode(clock)
        return {**values, **watch.values()}

    def setting(self, prompt: Sequence[int], n_tokens: int, n: int, warm_up: int) -> Setting:
        """All that decides what `run` measures."""
        here = machine.machine()
        return Setting(
            machine=here.slug,
            chip=here.chip,
            system=here.system,
            backend=here.backend,
            device=here.device,
            memory_bytes=here.memory_bytes,
            versions=" ".join(f"{k}={v}" for k, v in machine.versions().items()),
            commit=machine.commit(),
            engine="swiftlet-mlx" if self.pools else "mlx-lm",
            model=self.folder.name,
            model_hash=model_hash(self.folder),
            synthetic=is_synthetic(self.config),
            cache_bytes=self.pools.nbytes if self.pools else 0,
            threads=self.threads if self.pools else 0,
            io=self.io if self.pools else "",
            page_cache=self.page_cache,
            prompt_tokens=len(prompt),
            prompt_hash=prompts.digest(prompt),
            max_tokens=n_tokens,
            warm_up=warm_up,
            n=n,
        )

    def sizes(self) -> dict[str, float]:
        """What the model costs and a token touches, in bytes; empty for a resident model."""
        if self.pools is None:
            return {}
        tables = self.pools.source.tables
        return {
            "cache_slots": sum(pool.n_slots for pool in self.pools.layers.values()),
            "all_experts": sum(t.expert_count for t in tables.values()),
            "expert_bytes": max(t.payload_bytes for t in tables.values()),
        }

    def _counters(self) -> Stats:
        return self.pools.stats.copy() if self.pools else Stats()


@contextmanager
def opened(
    folder: Path,
    *,
    cache_gb: float | None = None,
    threads: int = IO_THREADS,
    io: IO = "cached",
    stock: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> Iterator[Subject]:
    """Load a model and close it at the end.

    Args:
        folder: A container or checkpoint folder.
        cache_gb: Slot pool in GB; None asks the machine.
        threads: That read experts.
        io: Whether experts may stay in the page cache, `cached` or `direct`.
        stock: Load with mlx-lm alone, every expert in memory; needs a checkpoint folder.
        warn: Called with remarks.

    Raises:
        SwiftletError: the model cannot be loaded.
    """

    def load() -> tuple[Any, Any]:
        if stock:
            return _stock(folder)
        model, config = load_streamed(folder, cache_gb=cache_gb, threads=threads, io=io, warn=warn)
        return model, load_text(folder, config) if has_tokenizer(folder) else None

    share = pagecache.cached_share(folder)
    process.reset_peak()
    start = time.perf_counter()
    with Engine(load, prefix_cache_gb=0) as engine:
        try:
            engine.wait()
        except EngineFailed as error:
            if isinstance(error.__cause__, SwiftletError):
                raise error.__cause__ from None
            raise
        yield Subject(engine, folder, threads, io, time.perf_counter() - start, pagecache.state(share))


def _stock(folder: Path) -> tuple[Any, Any]:
    """What `mlx_lm.load` would give, read into memory as its first token would."""
    from mlx_lm.utils import load_model

    if (folder / "packed_experts").is_dir():
        raise OptionError(
            f"{folder.name}: stock mlx-lm cannot read a container; give the MLX checkpoint it was made from"
        )
    model, config = load_model(folder, model_config=for_mlx_lm(read_config(folder)))
    return model, load_text(folder, config) if has_tokenizer(folder) else None


def _growth(held: Sequence[int]) -> float:
    """Bytes a token leaves allocated: the least that is held in the second half of a run against the first. A single
    reading swings by what MLX's reused buffers are too large."""
    half = len(held) // 2
    return (min(held[half:]) - min(held[:half])) / half


def _decode(clock: Clock) -> Mapping[str, float]:
    steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    n, seconds = len(steps), sum(steps)
    done = clock.at[-1].since(clock.at[0])
    head = steps[:FIRST_TOKENS]
    tail = steps[FIRST_TOKENS:] or steps
    ordered = sorted(steps)
    return {
        "decode_tokens_per_second": n / seconds,
        "first_tokens_per_second": len(head) / sum(head),
        "later_tokens_per_second": len(tail) / sum(tail),
        "slowest_token_seconds": ordered[-1],
        "p95_token_seconds": ordered[min(n - 1, int(n * 0.95))],
        "hit_rate": done.hit_rate,
        "reads_per_token": done.reads / n,
        "read_bytes_per_token": done.read_bytes / n,
        "wait_seconds_per_token": done.wait_seconds / n,
        "read_backs_per_token": done.read_backs / n,
        "evictions_per_token": done.evictions / n,
        "allocated_bytes_per_token": _growth(clock.active),
    }
