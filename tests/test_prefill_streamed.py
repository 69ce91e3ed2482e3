"""Prefill through streamed experts against stock mlx-lm: the same bits, each expert read at most once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5_moe, qwen3_moe, qwen3_next
from mlx_lm.models.cache import make_prompt_cache

from swiftlet_mlx import expert_pass
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.layer_major import LayerMajor, part_of, use_layer_major, use_stock_layers
from swiftlet_mlx.load import load_streamed
from swiftlet_mlx.prefill import prefill

E, K, V, LAYERS = 16, 4, 96, 4
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": E,
    "num_experts_per_tok": K,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": V,
    "mlp_only_layers": [],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
KINDS = {"qwen3_next": qwen3_next, "qwen3_5_moe": qwen3_5_moe, "qwen3_moe": qwen3_moe}


def stock(kind: str) -> Any:
    mx.random.seed(5)
    model = KINDS[kind].Model(KINDS[kind].ModelArgs.from_dict({"model_type": kind, **CONFIG}))
    nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for kind in KINDS:
        out[kind] = folder = tmp_path_factory.mktemp(kind)
        weights = dict(tree_flatten(stock(kind).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        width = {"group_size": 32, "bits": 4}
        config = {"model_type": kind, **CONFIG, "quantization": width, "quantization_config": width}
        (folder / "config.json").write_text(json.dumps(config))
    return out


class Reads:
    """A source that notes who is read, and may fail."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.tables = inner, inner.name, inner.tables
        self.seen: Counter[tuple[int, int]] = Counter()
        self.fail_at: int | None = None
        self._lock = threading.Lock()

    def read(self, layer: int, first: int, rows: Sequence[Any]) -> int:
        with self._lock:
            self.seen.update((layer, first + i) for i in range(len(rows)))
            if self.fail_at is not None and sum(self.seen.values()) >= self.fail_at:
                raise ReadFailed(f"layer {layer}, expert {first}: no such luck")
        return int(self.inner.read(layer, first, rows))

    def close(self) -> None:
        self.inner.close()


class Streamed:
    """A streamed model, its reads, and the slots of each layer."""

    def __init__(self, folder: Path, slots: int, **settings: Any) -> None:
        table = load_streamed(folder, cache_gb=1.0, threads=2)[0].pools.source.tables[0]
        self.expert_bytes = table.payload_bytes
        gb = (slots * LAYERS * self.expert_bytes + 100) / 1e9
        self.model: Any = load_streamed(folder, cache_gb=gb, threads=2)[0]
        self.pools = self.model.pools
        assert {p.n_slots for p in self.pools.layers.values()} == {slots}
        self.reads = self.pools.source = Reads(self.pools.source)
        use_stock_layers(self.model)
        assert use_layer_major(self.model, LayerMajor(**settings)) == LAYERS


@pytest.fixture
def streamed(folders: dict[str, Path]) -> Iterator[Any]:
    made: list[Streamed] = []

    def make(kind: str, slots: int, **settings: Any) -> Streamed:
        made.append(Streamed(folders[kind], slots, **settings))
        return made[-1]

    yield make
    for s in made:
        s.pools.close()


def ids(n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(1).integers(0, V, n)]


def same_cache(a: list[Any], b: list[Any]) -> bool:
    flat = [
        [np.array(v) for c in cache for v in (c.keys_and_values() if hasattr(c, "keys") else c.cache)]
        for cache in (a, b)
    ]
    return all(np.array_equal(u, v) for u, v in zip(*flat, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [4, 7, 16])
def test_prefill_equals_stock_to_the_bit_with_any_pool(kind: str, slots: int, streamed: Any) -> None:
    tokens = ids(131)
    plain, ours = stock(kind), streamed(kind, slots, chunk_tokens=50)
    want, got = make_prompt_cache(plain), make_prompt_cache(ours.model)
    for a, b in ((0, 100), (100, 130)):  # the second part continues a cached prefix
        mx.eval(plain(mx.array([tokens[a:b]]), cache=want))
        mx.eval([c.state for c in want])
        prefill(ours.model, tokens[a:b], got)
    assert same_cache(want, got)
    last = mx.array([tokens[-1:]])
    assert np.array_equal(np.array(plain(last, cache=want)), np.array(ours.model(last, cache=got)))
