"""Which expert to give up, compared on recorded routes: every policy replayed without a model, without a disk.

Knows keys and counts; no arrays, no clock. Each layer has a cache of its own, as in the real pools. Invariant: all
policies see the same requests, and `Belady`, who knows the future, is a bound that none of them beats.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from swiftlet_mlx.policy import LFU
from swiftlet_mlx.route_file import read_routes

Route = tuple[int, Sequence[int]]  # layer, its experts in one step


class Policy(Protocol):
    """What a cache asks of a policy. `residents` are those added and not evicted."""

    residents: set[int]

    def use(self, keys: Iterable[int]) -> None: ...
    def add(self, key: int) -> None: ...
    def evict(self, protected: Container[int] = ()) -> int: ...


class LRU:
    """The one used longest ago."""

    def __init__(self) -> None:
        self.residents: set[int] = set()
        self._order: OrderedDict[int, None] = OrderedDict()

    def use(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)

    def add(self, key: int) -> None:
        self.residents.add(key)
        self._order[key] = None

    def evict(self, protected: Container[int] = ()) -> int:
        key = next(k for k in self._order if k not in protected)
        del self._order[key]
        self.residents.remove(key)
        return key


class S3FIFO:
    """Two queues: newcomers pass through a small one and are kept if used again there; a ghost list lets those that
    come back straight into the large one (Yang et al., SOSP 2023)."""

    def __init__(self, small: float = 0.1) -> None:
        self.residents: set[int] = set()
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._freq: dict[int, int] = {}
        self._share = small

    def use(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self.residents:
                self._freq[key] = min(3, self._freq[key] + 1)

    def add(self, key: int) -> None:
        self.residents.add(key)
        self._freq[key] = 0
        if self._ghost.pop(key, self) is None:
            self._main.append(key)
        else:
            self._small.append(key)

    def evict(self, protected: Container[int] = ()) -> int:
        for _ in range(8 * len(self.residents) + 8):
            from_small = len(self._small) >= max(1, self._share * len(self.residents)) or not self._main
            queue = self._small if from_small else self._main
            key = queue.popleft()
            if key in protected:
                queue.append(key)
                if all(k in protected for k in queue):  # nobody to be found here
                    queue = self._main if from_small else self._small
                    key = next(k for k in queue if k not in protected)
                    queue.remove(key)
                    return self._gone(key)
            elif from_small and self._freq[key] > 0:
                self._freq[key] = 0
                self._main.append(key)
            elif not from_small and self._freq[key] > 0:
                self._freq[key] -= 1
                self._main.append(key)
            else:
                if from_small:
                    self._ghost[key] = None
                    if len(self._ghost) > len(self.residents):
                        self._ghost.popitem(last=False)
                return self._gone(key)
        raise LookupError("every resident is protected")

    def _gone(self, key: int) -> int:
        self.residents.remove(key)
        del self._freq[key]
        return key


class LeastStale:
    """Of those the last step did not use, the one that came first; experts of the last step stay."""

    def __init__(self) -> None:
        self.residents: set[int] = set()
        self._queue: deque[int] = deque()
        self._fresh: set[int] = set()

    def use(self, keys: Iterable[int]) -> None:
        self._before, self._fresh = self._fresh, set(keys)

    def add(self, key: int) -> None:
        self.residents.add(key)
        self._queue.append(key)

    def evict(self, protected: Container[int] = ()) -> int:
        free = [k for k in self._queue if k not in protected]
        key = next((k for k in free if k not in self._before), free[0])
        self._queue.remove(key)
        self.residents.remove(key)
        return key


class Belady:
    """The one whose next use is furthest away. Needs the future: `at` is the step the cache has reached."""

    def __init__(self, uses: dict[int, list[int]]) -> None:
        self.residents: set[int] = set()
        self.at = -1
        self._uses = uses

    def use(self, keys: Iterable[int]) -> None:
        self.at += 1

    def add(self, key: int) -> None:
        self.residents.add(key)

    def evict(self, protected: Container[int] = ()) -> int:
        key = max((k for k in self.residents if k not in protected), key=self._next)
        self.residents.remove(key)
        return key

    def _next(self, key: int) -> int:
        steps = self._uses[key]
        n = bisect_right(steps, self.at)
        return steps[n] if n < len(steps) else sys.maxsize


ONLINE: dict[str, Callable[[], Policy]] = {
    "LRU": LRU,
    "LFU": lambda: LFU(sys.maxsize),
    "LFU, halved/512": lambda: LFU(512),
    "LFU, halved/2048": LFU,
    "LFU, halved/8192": lambda: LFU(8192),
    "S3-FIFO": S3FIFO,
    "least stale": LeastStale,
}


def replay(steps: Iterable[Sequence[int]], n_slots: int, policy: Policy) -> tuple[int, int]:
    """Run one layer's steps through a cache.

    Args:
        steps: the experts of each step.
        n_slots: at least as many as a step has experts.
        policy: fresh.

    Returns:
        (hits, experts needed).
    """
    hits = needed = 0
    for step in steps:
        experts = list(dict.fromkeys(step))
        policy.use(experts)
        missing = [e for e in experts if e not in policy.residents]
        hits += len(experts) - len(missing)
        needed += len(experts)
        for e in missing:
            if len(policy.residents) == n_slots:
                policy.evict(experts)
            policy.add(e)
    return hits, needed


def hit_rates(routes: Iterable[Route], n_slots: int) -> dict[str, float]:
    """Hit rate of every policy over all layers, with `n_slots` slots each; Belady's last."""
    layers: dict[int, list[Sequence[int]]] = defaultdict(list)
    for layer, experts in routes:
        layers[layer].append(experts)
    rates = {}
    for name, make in ONLINE.items():
        done = [replay(steps, n_slots, make()) for steps in layers.values()]
        rates[name] = sum(h for h, _ in done) / max(1, sum(n for _, n in done))
    done = []
    for steps in layers.values():
        uses: dict[int, list[int]] = defaultdict(list)
        for at, step in enumerate(steps):
            for e in dict.fromkeys(step):
                uses[e].append(at)
        done.append(replay(steps, n_slots, Belady(uses)))
    rates["Belady"] = sum(h for h, _ in done) / max(1, sum(n for _, n in done))
    return rates


def skewed(
    layers: int = 8,
    experts: int = 256,
    top_k: int = 8,
    steps: int = 1500,
    skew: float = 0.8,
    again: float = 0.3,
    topic_steps: int = 400,
    seed: int = 0,
) -> list[Route]:
    """Made-up routes: some experts are liked more than others, some of the last step are used again, and every so often
    the conversation turns to other experts.

    Args:
        layers: Each with routes of its own.
        experts: A layer.
        top_k: Experts a step uses.
        steps: Tokens.
        skew: Popularity falls as rank to the power of minus this.
        again: Chance that an expert of the last step is used again.
        topic_steps: Steps until half of the ranks are dealt anew.
        seed: Of all draws.
    """
    rng = random.Random(seed)
    weights = [(n + 1) ** -skew for n in range(experts)]
    orders = [rng.sample(range(experts), experts) for _ in range(layers)]
    last: list[list[int]] = [[] for _ in range(layers)]
    routes: list[Route] = []
    for step in range(steps):
        for layer in range(layers):
            if step and step % topic_steps == 0:
                moved = rng.sample(range(experts), experts // 2)
                values = [orders[layer][n] for n in moved]
                rng.shuffle(values)
                for n, value in zip(moved, values, strict=True):
                    orders[layer][n] = value
            chosen = dict.fromkeys(e for e in last[layer] if rng.random() < again)
            while len(chosen) < top_k:
                chosen[orders[layer][rng.choices(range(experts), weights)[0]]] = None
            last[layer] = list(chosen)
            routes.append((layer, last[layer]))
    return routes


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay a recorded file, or made-up routes, at several cache sizes."""
    parser = argparse.ArgumentParser(prog="python -m swiftlet_bench.policy", description=main.__doc__)
    parser.add_argument("routes", nargs="?", type=Path, help="from `generate --record-routes`; made up if left out")
    parser.add_argument("--slots", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="shares of a layer's experts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.routes is None:
        routes, n_experts, top_k = skewed(), 256, 8
    else:
        info, recorded = read_routes(options.routes)
        routes, n_experts, top_k = list(recorded), info.experts, info.top_k
    table = {share: hit_rates(routes, max(top_k, round(share * n_experts))) for share in options.slots}
    if options.json:
        print(json.dumps(table))
        return
    print(f"{'share of experts':18}" + "".join(f"{share:>8.0%}" for share in table))
    for name in [*ONLINE, "Belady"]:
        print(f"{name:18}" + "".join(f"{rates[name]:>8.1%}" for rates in table.values()))


if __name__ == "__main__":
    main()
