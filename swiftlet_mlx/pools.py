"""All slot pools of one model: which experts are fetched when, and the fence that keeps the slots' invariant.

    A slot is overwritten only when no unevaluated graph can read it.

Whatever a streamed layer returned last is evaluated together with the next router choice (`read_back`, `choice`),
before any slot changes hands. In the other direction: what reads a slot is not evaluated before the slot is filled.
While a model builds the graph of a step and evaluates nothing (`building`), a layer's reads may therefore go on behind
its back until the next read-back, or its graph may be built before the device has come to its choice (`choose_later`):
slot numbers are then written, like experts, into memory that a graph was built on. What a later layer is guessed to
need is read while the device computes and waited for like anything else: a wrong guess costs a read and nothing more.
Only the thread that owns the model may call anything here but `ask_for` and `limit`; read threads touch bytes alone.
Residency belongs to one model instance: two models in one process share nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .bulk import Prefetch, fill
from .choice import Asked, Guess
from .cuda import Staging
from .device import backend
from .machine import return_freed_memory
from .memory import Plan, minimum_bytes, split
from .read_threads import ReadThreads
from .reader import ExpertSource
from .reads import Reads
from .slots import EMPTY, SlotPool
from .stats import Stats

T = TypeVar("T")

# A layer output larger than this is evaluated at once instead of being held for the next read-back: holding it would
# keep a prompt chunk's activations alive, evaluating it costs one synchronisation in a call that is long anyway.
HOLD_BYTES = 1 << 20
SMALL_BYTES = 64 << 10  # of an expert: while reads are short, it is read sooner than a thread wakes up
LONG_SECONDS = 0.5e-3  # of waiting in a layer: splitting off less costs more than it hides
WAITS = 16  # that make up the typical one


@dataclass(frozen=True, slots=True)
class _Later:
    """A layer's choice under way, whose slots a graph has been built on already."""

    pool: SlotPool
    asked: Asked
    shape: tuple[int, ...]
    guess: Guess | None


class Pools:
    """The slot pools, their source and their reads.

    Args:
        source: where experts are read from.
        n_slots: layer to number of slots.
        threads: that read; closed with the pools.
        top_k: experts a token uses in a layer, 0 if unknown.

    Attributes:
        stats: what was read, found and waited for.
        recorder: called with (layer, experts) for each layer call of a decode step, if set. Resident layers then
            read the router's choice back, too.
        plan: how memory was divided when the model was loaded.
        on_step: called before each decode step, if set; may return a number of bytes to ask for.
        foresight: called before each decode step, if set; whether to read ahead in it.
        alone: set by an engine, which owns its model: nobody evaluates anything in the middle of a step, so a step's
            graph may be built on slots that are still being filled. A script that calls the model itself may have
            put anything in between (a tracer that evaluates what a block returns), so there it stays off.
        in_doubt: true while slots change hands. Found true, that was broken off, and is put right first.
    """

    def __init__(self, source: ExpertSource, n_slots: Mapping[int, int], threads: ReadThreads, top_k: int = 0) -> None:
        self.source = source
        self.stats = Stats()
        self.plan: Plan | None = None
        self.on_step: Callable[[], int | None] | None = None
        self.foresight: Callable[[], bool] | None = None
        self.looking_ahead = False
        self.alone = False
        self.in_doubt = False
        self.top_k = top_k
        self.first = min(n_slots)
        # in turns: what is read ahead for a layer must not wait for what is on its way to the layer before
        self._staging = (Staging(), Staging()) if backend() == "cuda" else None
        turns = cycle(self._staging or (None,))
        self.layers = {layer: SlotPool(source.tables[layer], n_slots[layer], next(turns)) for layer in sorted(n_slots)}
        self.recorder: Callable[[int, list[int]], None] | None = None
        self.direct = all(pool.direct for pool in self.layers.values())
        self._limit_of_numbers = max(pool.table.expert_count for pool in self.layers.values())
        self._threads = threads
        self._readers: dict[SlotPool, list[mx.array]] = {}
        self._later: _Later | None = None
        self._open: Reads | None = None
        self._guess: tuple[SlotPool, list[int]] | None = None
        self._ahead: Reads | None = None  # of a guess
        self._awaited: set[int] = set()  # guessed right
        self._typical_wait = 0.0
        self._building = False
        self._wanted = self._size = self.nbytes  # asked for, and what the pools were last set to
        self._limit: int | None = None
        self._changed = False
        self._prefetch = Prefetch(source, threads, self.stats)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in self.layers.values())

    # ---- the fence

    def read_back(self, indices: mx.array) -> NDArray[np.uint32]:
        """Host synchronisation: the router's choice as numbers, and with it everything that still reads a slot."""
        self._evaluate(indices)
        return np.array(indices, copy=True).astype(np.uint32, copy=False)

    def choice(self, pool: SlotPool, indices: mx.array, guess: Guess | None = None) -> list[int]:
        """The same as a flat list: half the time for a token's experts.

        Args:
            pool: of the layer that chooses. What was guessed for it is read meanwhile.
            indices: the router's choice.
            guess: what a later layer may need, to be read back in the same go.
        """
        asked = self._ask(indices, guess)
        self._evaluate(*asked.lazy, chooser=pool)
        return self._told(asked, guess)

    def _ask(self, indices: mx.array, guess: Guess | None) -> Asked:
        arrays = [indices] if guess is None else [indices, guess.experts]
        return Asked(arrays, self._limit_of_numbers, far=self._staging is not None)

    def _told(self, asked: Asked, guess: Guess | None) -> list[int]:
        numbers = asked.numbers()
        if guess is not None:
            self._guess = self.layers[guess.layer], numbers[1]
        return numbers[0]

    def distinct(self, pool: SlotPool, experts: list[int]) -> list[int]:
        """A layer's choice without repetitions; the recorder hears of it."""
        needed = list(dict.fromkeys(experts))
        if self.recorder is not None:
            self.recorder(pool.table.layer, needed)
        return needed

    def may_choose_later(self, pool: SlotPool, indices: mx.array) -> bool:
        """Whether `choose_later` is allowed and worth it: the device computes on while a layer's reads are short."""
        return self.may_wait_later(indices) and indices.size <= pool.n_slots and not self.waits_long

    def choose_later(self, pool: SlotPool, indices: mx.array, guess: Guess | None = None) -> mx.array:
        """An array like `indices` for the slots of a choice that is being made: a graph may be built on it while the
        device comes to that choice. The next call, or the end of the step, reads the choice back and fills it in.

        Args:
            pool: of the layer that chooses.
            indices: the router's choice.
            guess: what a later layer may need, to be read back in the same go.
        """
        self._come_to_rest()
        if pool in self._readers:  # of the step before: evaluated long since, but for a model of one layer
            mx.eval(*self._readers.pop(pool))
        asked = self._ask(indices, guess)
        mx.async_eval(*asked.lazy)  # type: ignore[no-untyped-call]
        self._begin_guessed(pool)
        self._later = _Later(pool, asked, indices.shape, guess)
        return pool.lookup_later(indices.shape)

    def resolve(self) -> None:
        """Make resident what was chosen by the layer whose graph has been built ahead, and fill in its slots.

        Raises:
            ReadFailed: as `wait`.
        """
        later, self._later = self._later, None
        if later is None:
            return
        pool = later.pool
        experts = self._told(later.asked, later.guess)  # host synchronisation
        self.stats.read_backs += 1
        needed = self.distinct(pool, experts)
        built = self._readers.pop(pool, [])  # on the slots it is about to be given
        self.begin(pool, needed)
        self.wait()
        pool.tell(experts, later.shape)
        if built:
            self._readers[pool] = built

    def hold(self, output: mx.array, pool: SlotPool) -> None:
        """Remember an array whose graph reads a pool's slots, so that it is evaluated before they change hands."""
        if output.nbytes > HOLD_BYTES:
            self.resolve()
            self.wait()
            mx.eval(output)
        else:
            self._readers.setdefault(pool, []).append(output)

    @property
    def waits_long(self) -> bool:
        """Whether a layer waits for its reads so long that other work is worth being split off meanwhile.

        Not on CUDA: MLX chooses its kernels there by the number of a token's experts, and fewer give other last bits.
        """
        return self._staging is None and self._typical_wait > LONG_SECONDS

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around code that builds the graph of a step and evaluates none of it but through the read-backs here."""
        self._building = True
        try:
            yield
        except BaseException:
            self._recover()
            raise
        finally:
            self._building = False
        self.resolve()
        self.wait()

    def _evaluate(self, *arrays: mx.array, chooser: SlotPool | None = None) -> None:
        self._come_to_rest()
        self._begin_guessed(chooser)
        mx.eval(*arrays, *chain.from_iterable(self._readers.values()))
        self._readers.clear()
        self.stats.read_backs += 1

    def _come_to_rest(self) -> None:
        """End whatever fills slots, of layers that choose later and of those that do not."""
        self.resolve()
        self.wait()
        self._prefetch.end()

    def _begin_guessed(self, chooser: SlotPool | None) -> None:
        """Read what was guessed for the layer that chooses next."""
        guess, self._guess = self._guess, None
        # One for another layer is left of a step that broke off. Read now, it would share staging rows with this layer.
        if guess is not None and guess[0] is chooser:
            self._read_ahead(*guess)

    # ---- fetching what a layer needs

    def load(self, layer: int, experts: Sequence[int]) -> None:
        """Make distinct experts of one layer resident; returns when all are.

        Must follow a `read_back` with no streamed layer built in between.

        Raises:
            ReadFailed: the first failure, after every other read of this call has ended.
        """
        self.begin(self.layers[layer], experts)
        self.wait()

    def begin(self, pool: SlotPool, experts: Sequence[int]) -> Mapping[int, int] | None:
        """Start the reads of those that are missing. `wait` must follow.

        Returns:
            The slots of the experts that are being read, None if all are there.
        """
        if pool in self._readers:
            raise RuntimeError("a slot would be overwritten while an unevaluated graph may read it")
        if self._open is not None or self.in_doubt:
            self._recover()
        coming = self._coming(pool, experts)
        pool.policy.use(experts)
        slots, stats = pool.slots, self.stats
        missing = [e for e in experts if slots[e] == EMPTY]
        stats.misses += len(missing)
        stats.hits += len(experts) - len(missing)
        if not missing:
            return None
        self._awaited = {e for e in missing if e in coming}
        stats.foreseen += len(self._awaited)
        wanted = [e for e in missing if e not in coming]
        claimed = {e: coming[e] for e in self._awaited}
        if wanted:
            claimed.update(self._post(pool, wanted, experts).claims)
        return claimed

    def _coming(self, pool: SlotPool, experts: Sequence[int]) -> dict[int, int]:
        """The slots of a pool that are being filled on a guess."""
        if self._ahead is None or self._ahead.pool is not pool:
            return {}
        coming = dict(self._ahead.claims)
        if pool.n_slots < len({*experts, *coming}):  # what was guessed wrong is in the way
            self.wait()
            return {}
        return coming

    def _read_ahead(self, pool: SlotPool, experts: Sequence[int]) -> None:
        """Start the reads of what the layer whose choice is about to be evaluated will probably need."""
        missing = [e for e in experts if pool.slots[e] == EMPTY]
        if missing and len(experts) <= pool.n_slots and pool.direct and pool not in self._readers:
            self._post(pool, missing, experts, ahead=True)
            self.stats.guessed += len(missing)

    def _post(self, pool: SlotPool, wanted: Sequence[int], protected: Sequence[int], ahead: bool = False) -> Reads:
        if self._threads.closed:
            raise RuntimeError("the model's pools are closed: its experts can no longer be read")
        before = len(pool.policy.residents)
        self.in_doubt = True
        reads = Reads(pool, pool.claim(wanted, protected))
        if ahead:
            self._ahead = reads
        else:
            self._open = reads
        if pool.table.payload_bytes <= SMALL_BYTES and not ahead and not self.waits_long:
            reads.own = list(reads.claims)
        else:
            for expert, slot in reads.claims:
                self._threads.post(reads.read, self.source, expert, slot)
        self.in_doubt = False
        self.stats.evictions += before - len(pool.policy.residents)
        return reads

    def hand_over(self) -> None:
        """Wait until the reads that were begun are in the system's hands, where they need no turn with Python."""
        reads = self._open
        if reads is not None:
            for _ in range(min(len(reads.claims) - len(reads.own), self._threads.count)):
                reads.begun.get()

    def may_wait_later(self, indices: mx.array) -> bool:
        """Whether a layer may go on building on slots that are still being filled: one token a sequence, so that
        nothing is evaluated in chunks, and slots that keep their arrays when they are filled."""
        return self._building and indices.ndim == 3 and indices.shape[1] == 1 and self.direct

    def wait(self) -> None:
        """Wait for the reads under way, if any, and enter them into the slot table.

        Raises:
            ReadFailed: the first failure; the slots of failed reads are given back empty.
        """
        if self.in_doubt:  # some may never have been asked for
            return self._recover()
        if self._open is None and self._ahead is None:
            return
        start = time.perf_counter()
        self.in_doubt = True
        for reads in (self._open, self._ahead):
            if reads is not None:
                while reads.own:
                    reads.read(self.source, *reads.own.pop())
                if len(reads.results) < len(reads.claims):
                    self._threads.help()
                while len(reads.results) < len(reads.claims):
                    reads.done.get()
        waited = time.perf_counter() - start
        self.stats.wait_seconds += waited
        self._typical_wait += (waited - self._typical_wait) / WAITS
        self._settle()
        self.in_doubt = False

    def _settle(self) -> None:
        failure = None
        for reads, awaited in ((self._open, None), (self._ahead, self._awaited)):
            if reads is not None:
                failure = self._enter(reads, awaited) or failure
        self._open = self._ahead = None
        self._awaited = set()
        if failure is not None:
            self._readers.clear()  # what was built on the slots that failed is nobody's
            raise failure

    def _enter(self, reads: Reads, awaited: Container[int] | None) -> BaseException | None:
        """Enter what was read into the slot table; the failure, if one of those that are awaited failed."""
        pool, failure = reads.pool, None
        pool.filled([slot for _, slot, _, staging, error in reads.results if error is None and staging is None])
        for expert, slot, read_bytes, staging, error in reads.results:
            if error is None:
                self.stats.reads += 1
                self.stats.read_bytes += read_bytes
                if staging is not None:
                    pool.store_staged(slot, staging)
            elif awaited is None or expert in awaited:
                failure = failure or error
            pool.settle(expert, slot, ok=error is None)
        return failure

    def _recover(self) -> None:
        """Something was broken off (Ctrl-C) while slots changed hands: end the reads, keep what they brought."""
        self._guess = self._later = None
        if self._open is None and self._ahead is None and not self.in_doubt:
            return
        self.in_doubt = True
        self._threads.drain()
        for reads in (self._open, self._ahead):
            if reads is not None:
                _complete(reads)
        try:
            self._settle()
        except Exception:  # nobody waits for these experts any more
            pass
        self._prefetch.end()
        if self._staging is not None:
            mx.synchronize()  # moves out of staging rows that nobody remembers
        for pool in self.layers.values():
            pool.mend()
        self.in_doubt = False

    # ---- while nothing else is read

    def prefetch(self, wanted: Mapping[int, Sequence[int]]) -> None:
        """Read experts into free slots in the background. What has not begun when a layer is first used is dropped.

        Args:
            wanted: layer to experts, most wanted first.
        """
        self._recover()  # what is on its way on a wrong guess must not be given a second slot
        self._prefetch.end()
        if self.direct and self._staging is None:  # staging is for one layer at a time
            self.in_doubt = True
            self._prefetch.claim(self.layers.values(), wanted)
            self.in_doubt = False
            self._prefetch.start()

    # ---- more or less memory

    def ask_for(self, budget: int) -> None:
        """Have pools of `budget` bytes from the next step on. From any thread."""
        self._wanted = budget
        self._changed = True

    def limit(self, budget: int | None) -> None:
        """Have no more than `budget` bytes, whatever is asked for, until the limit is lifted. From any thread."""
        self._limit = budget
        self._changed = True

    def before_step(self) -> None:
        """Called by the first streamed layer when a decode step reaches it: the moment for changes."""
        self.looking_ahead = self.alone and self.foresight is not None and self.foresight()
        size = self.on_step() if self.on_step is not None else None
        if size is not None:
            self.ask_for(size)
        if self._changed:
            self.apply()

    def apply(self) -> None:
        """Do now what was asked for."""
        self._changed = False
        limit = self._limit
        target = self._wanted if limit is None else min(self._wanted, limit)
        if target != self._size:
            try:
                self.resize(target)
            except KeyboardInterrupt:  # some pools have their new size, some the old one: once more, next time
                self._size, self._changed = -1, True
                raise

    def resize(self, budget: int) -> None:
        """Change the pools to `budget` bytes, or the least or most that makes sense. What is dropped is really freed.

        Args:
            budget: bytes of all slots. While one layer's section is copied, memory holds it twice.
        """
        self._size = budget
        self._recover()
        self._prefetch.end()
        # graphs that still read the old arrays would keep them alive
        mx.eval(*chain.from_iterable(self._readers.values()))
        self._readers.clear()
        tables = self.source.tables
        n_slots = split(tables, max(budget, minimum_bytes(tables, self.top_k)), self.top_k)
        self.in_doubt = True
        for layer, pool in sorted(self.layers.items(), key=lambda item: n_slots[item[0]] - item[1].n_slots):
            if n_slots[layer] != pool.n_slots:  # those that shrink come first
                before = len(pool.policy.residents)
                pool.resize(n_slots[layer])
                self.stats.evictions += before - len(pool.policy.residents)
        self.in_doubt = False
        return_freed_memory()

    # ---- everything at once

    def fill(self) -> None:
        """Load every layer whose pool holds all its experts, so that it never needs a read-back."""
        whole = [p for p in self.layers.values() if p.n_slots == p.table.expert_count and p.direct]
        for pools in [whole] if self._staging is None else [[pool] for pool in whole]:
            fill(pools, self.source, self._threads, self.stats)
            if self._staging is not None:
                mx.synchronize()  # the next layer is read into the same rows

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run `work` on a read thread; it may touch bytes, no arrays."""
        return self._threads.submit(work, *args)

    def close(self) -> None:
        """End the read threads and close the files."""
        self._threads.close()
        self.source.close()


def _complete(reads: Reads) -> None:
    """Give a result to the claims whose reads were never asked for."""
    read = {expert for expert, *_ in reads.results}
    reads.results += [(e, slot, 0, None, InterruptedError()) for e, slot in reads.claims if e not in read]
