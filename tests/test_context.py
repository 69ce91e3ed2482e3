"""The longest conversation is set by the model or by memory, whichever is less."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from talkers import Scripted, random_model, tokenizer

from swiftlet_mlx import context
from swiftlet_mlx.engine import Engine


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe", "qwen3_moe"])
def test_a_token_costs_what_the_growing_caches_hold_of_it(kind: str) -> None:
    model = random_model(kind)
    growing = [c for c in make_prompt_cache(model) if isinstance(c, KVCache)]
    # Two key-value heads of width 8, keys and values, 16 bits each.
    assert context.bytes_per_token(model) == len(growing) * 2 * 2 * 8 * 2


def test_the_smaller_limit_holds_and_is_named() -> None:
    model = random_model()
    each = context.bytes_per_token(model)
    assert context.longest(model, 10**12) == (4096, "model")
    assert context.longest(model, each * 2 * 100) == (100, "memory")
    assert context.longest(model, 0) == (1, "memory")
    assert context.longest(Scripted([[1]], eos=2, context=77), 0) == (77, "model"), "nothing is said about its caches"


def test_past_conversations_get_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def budget(**options: Any) -> int:
        with Engine(lambda: (random_model("qwen3_moe"), tokenizer()), **options) as engine:
            engine.wait()
            return engine.store.budget_bytes

    monkeypatch.setattr("swiftlet_mlx.memory.available_bytes", lambda: 800_000_000)
    assert budget() == 100_000_000
    assert budget(prefix_cache_gb=0.25) == 250_000_000
    monkeypatch.setattr("swiftlet_mlx.memory.available_bytes", lambda: 10**12)
    assert budget() == 10**9


def test_a_conversation_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from swiftlet_mlx.completion import Completions
    from swiftlet_mlx.errors import ContextFull

    model = random_model()
    monkeypatch.setattr("swiftlet_mlx.memory.available_bytes", lambda: 2 * 50 * context.bytes_per_token(model))
    with Engine(lambda: (model, tokenizer())) as engine:
        completions = Completions(engine)
        assert engine.context_tokens == 50
        with pytest.raises(ContextFull, match="memory"):
            completions.chat([{"role": "user", "content": "word " * 60}])
