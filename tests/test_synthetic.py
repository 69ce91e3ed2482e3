"""Synthetic models: the shapes are the real ones, the weights behave, the bytes are reproducible."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from swiftlet_bench import predict, shapes, synthetic, weights
from swiftlet_bench.synthetic import make_checkpoint, make_container
from swiftlet_repack.write import repack_checkpoint

from swiftlet_mlx.config import ModelConfig, for_mlx_lm, read_config
from swiftlet_mlx.errors import DiskFull, OptionError, OutputExists
from swiftlet_mlx.loader import load, load_streamed
from swiftlet_mlx.qpack import open_container

FIXTURES = Path(os.environ.get("SWIFTLET_FIXTURES", Path(__file__).parents[2] / "shared" / "fixtures" / "swiftlet"))
TINY: dict[str, Any] = {"config": shapes.preset("tiny"), "group_size": 32, "dtype": mx.float32}


def make(folder: Path, checkpoint: bool = False, **changes: Any) -> Path:
    settings = {**TINY, **changes}
    return (make_checkpoint if checkpoint else make_container)(folder, settings.pop("config"), **settings)


def layer_bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "packed_experts").glob("*.bin"))}


# ---- shapes


@pytest.mark.parametrize(
    ("name", "expert_bytes", "all_gb", "cycle_gb"),
    [
        ("qwen3.6-35b", 1_769_472, 18.12, 0.566),
        ("qwen3-next-80b", 1_769_472, 43.49, 0.849),
        ("qwen3.5-397b", 7_077_888, 217.43, 4.247),
    ],
)
def test_presets_have_the_sizes_of_the_released_models(
    name: str, expert_bytes: int, all_gb: float, cycle_gb: float
) -> None:
    shape = predict.shape_of(name, shapes.preset(name))
    assert shape.expert_bytes == expert_bytes
    assert shape.all_experts_bytes / 1e9 == pytest.approx(all_gb, abs=0.01)
    assert shape.cycle_bytes / 1e9 == pytest.approx(cycle_gb, abs=0.001)


@pytest.mark.parametrize("name", shapes.RELEASED)
def test_presets_agree_with_the_published_configs(name: str) -> None:
    published = FIXTURES / "model-configs" / f"{name}.json"
    if not published.is_file():
        pytest.skip("the published configs are not beside this checkout")
    theirs = json.loads(published.read_text())
    theirs, ours = theirs.get("text_config", theirs), shapes.PRESETS[name]
    same = {k: v for k, v in ours.items() if k in theirs and k != "model_type"}
    assert len(same) >= 18
    assert {k: theirs[k] for k in same if k != "rope_parameters"} == {
        k: v for k, v in same.items() if k != "rope_parameters"
    }


def test_a_preset_can_be_made_smaller_and_refuses_nonsense() -> None:
    shape = ModelConfig.from_dict(shapes.preset("qwen3.6-35b", layers=4, experts=16, vocab=512), "")
    assert (shape.layer_count, shape.expert_count, shape.top_k) == (4, 16, 8)
    for wrong in ({"layers": 0}, {"experts": 4}, {"vocab": 10}):
        with pytest.raises(OptionError):
            shapes.preset("qwen3.6-35b", **wrong)
    with pytest.raises(OptionError, match="medium"):
        shapes.preset("qwen9")


# ---- bytes


@pytest.mark.parametrize(("bits", "dtype"), [(4, mx.float32), (8, mx.float16), (None, mx.bfloat16)])
def test_container_and_checkpoint_of_one_seed_are_the_same_model(
    tmp_path: Path, bits: int | None, dtype: mx.Dtype
) -> None:
    container = make(tmp_path / "a.qpack", bits=bits, dtype=dtype)
    checkpoint = make(tmp_path / "b", checkpoint=True, bits=bits, dtype=dtype)
    repacked = repack_checkpoint(checkpoint, tmp_path / "c.qpack")
    assert layer_bytes(container) == layer_bytes(repacked)
    assert (container / "model.safetensors").read_bytes() == (repacked / "model.safetensors").read_bytes()
    assert (container / "packed_experts/layout.json").read_bytes() == (
        repacked / "packed_experts/layout.json"
    ).read_bytes()


def test_the_seed_decides_every_byte_and_no_two_experts_are_equal(tmp_path: Path) -> None:
    first, again, other = (make(tmp_path / f"{n}.qpack", seed=seed) for n, seed in enumerate((3, 3, 4)))
    assert layer_bytes(first) == layer_bytes(again) != layer_bytes(other)
    table = open_container(first).layers[0]
    blobs = [
        data[e * table.stride : (e + 1) * table.stride]
        for data in layer_bytes(first).values()
        for e in range(table.expert_count)
    ]
    assert len(set(blobs)) == len(blobs) == 64


def test_synthetic_models_say_so(tmp_path: Path) -> None:
    opened = open_container(make(tmp_path / "a.qpack", seed=7))
    assert opened.source == "synthetic: random weights, seed 7"
    assert synthetic.is_synthetic(read_config(opened.path))
    assert not synthetic.is_synthetic({"model_type": "qwen3_next"})


# ---- weights


@pytest.mark.parametrize("bits", [4, 8])
def test_embeddings_carry_the_pattern_and_the_output_layer_does_not_see_it(bits: int) -> None:
    rows, width = 64, 128
    pattern = np.where(np.arange(width) % 2 == 0, 1.0, -1.0)

    def matrix(kind: str, deviation: float) -> np.ndarray:
        packed = np.concatenate(list(weights.quantized(weights.generator(0, kind), rows, width, bits, kind)))
        scale, bias = weights.scales(weights.generator(0, "s"), rows * width // 32, deviation, 1 << bits, kind)
        return np.array(
            mx.dequantize(
                mx.array(packed.view(np.uint32)).reshape(rows, -1),
                mx.array(scale).reshape(rows, -1),
                mx.array(bias).reshape(rows, -1),
                group_size=32,
                bits=bits,
            )
        )

    embedding = matrix("embedding", 1.0)
    assert (embedding @ pattern / width).mean() == pytest.approx(weights.PATTERN, abs=0.03)
    assert (embedding - np.outer(embedding @ pattern / width, pattern)).std() == pytest.approx(1, abs=0.05)
    output = matrix("output", 0.1)
    assert np.abs(output @ pattern).max() < 1e-5
    assert output.std() == pytest.approx(0.1, rel=0.05)
    assert matrix("plain", 0.1).std() == pytest.approx(0.1, rel=0.1)


def test_bfloat16_is_rounded_as_mlx_rounds_it() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(weights.as_tag(values, "BF16").view(np.uint16), expected)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], dict[int, list[list[int]]], int]:
    """What a small model says greedily, and its routes."""
    config = shapes.preset("tiny", experts=32)
    folder = make_container(tmp_path_factory.mktemp("spoken") / "m.qpack", config, group_size=32, dtype=mx.float32)
    model, _ = load_streamed(folder, cache_gb=1)
    routes: dict[int, list[list[int]]] = {}
    model.pools.recorder = lambda layer, experts: routes.setdefault(layer, []).append(list(experts))
    cache, token, said = make_prompt_cache(model), 1, []
    for _ in range(200):
        logits = model(mx.array([[token]]), cache=cache)[0, -1]
        assert bool(mx.isfinite(logits).all())
        token = int(mx.argmax(logits).item())
        said.append(token)
    model.pools.close()
    return said, routes, 32


def test_greedy_output_is_varied_and_finite_over_hundreds_of_tokens(
    spoken: tuple[list[int], dict[int, list[list[int]]], int],
) -> None:
    said, _, _ = spoken
    assert len(set(said)) > 60
    assert len(set(said[-100:])) > 25  # and does not end in a loop


def test_routers_have_favourites_as_real_ones_have(
    spoken: tuple[list[int], dict[int, list[list[int]]], int],
) -> None:
    _, routes, n_experts = spoken
    for layer, steps in routes.items():
        counts = sorted(Counter(itertools.chain(*steps)).values(), reverse=True)
        share = sum(counts[: n_experts // 4]) / sum(counts)
        assert 0.5 < share < 0.9, (layer, share)
        assert len(counts) > n_experts // 2  # but nobody is never chosen


def test_stock_mlx_lm_loads_the_checkpoint_and_says_the_same(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "c", checkpoint=True)
    stock, _ = load_model(checkpoint, model_config=for_mlx_lm(read_config(checkpoint)))
    streamed, _ = load_streamed(make(tmp_path / "c.qpack"), cache_gb=0.00005)
    ids = mx.array([[1, 5, 9, 42, 7]])
    assert mx.array_equal(stock(ids), streamed(ids)).item()
    streamed.pools.close()


def test_text_goes_in_and_every_id_comes_out(tmp_path: Path) -> None:
    folder = make(tmp_path / "a.qpack", tokenizer=True)
    model, tokenizer = load(folder)
    text = "Grüße, 世界 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.decode([n]) for n in range(5, 512))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).startswith("<|im_start|>")
    model.pools.close()


# ---- writing


def test_nothing_is_written_where_there_is_no_room_or_something_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputExists):
        make(tmp_path / "taken")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * 10**9))
    with pytest.raises(DiskFull, match="--layers"):
        make(tmp_path / "full.qpack")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken"]


def test_a_run_that_breaks_off_leaves_no_model(tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "a.qpack", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_width_that_does_not_divide_into_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="groups of 64"):
        make(tmp_path / "a.qpack", group_size=64)
    with pytest.raises(OptionError, match="bits"):
        make(tmp_path / "a.qpack", bits=3)


@pytest.mark.slow
def test_memory_is_bounded_while_gigabytes_are_written(tmp_path: Path) -> None:
    program = (
        "import resource; from pathlib import Path; from swiftlet_bench import shapes, synthetic;"
        f"synthetic.make_container(Path({str(tmp_path)!r}) / 'm.qpack', shapes.preset('qwen3.6-35b', layers=3));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert peak < 300e6
