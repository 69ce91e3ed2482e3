"""The prefill benchmark runs on a container it made itself, and says what it says it says."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from swiftlet_bench import prefill as bench
from swiftlet_bench.shapes import QWEN35_35B
from swiftlet_bench.synthetic import make_container

SMALL = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "small.qpack"
    return make_container(folder, {**QWEN35_35B, **SMALL}, dtype=mx.float32)


def test_prefill_benchmark_reports_one_read_of_each_expert_and_ratios_of_one_run(
    container: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.run(
        [str(container), "--lengths", "60", "--cache-gb", "0.0003", "--resident", "--decode-step", "16", "--cold"]
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_case = {line["case"]: line for line in lines}
    assert list(by_case) == ["resident", "setting", "one pass", "streamed", "decode path"]
    empty, warm = (line for line in lines if line["case"] == "streamed")
    assert (empty["pool"], warm["pool"]) == ("empty", "warm")
    everything = by_case["one pass"]["bytes"]
    assert everything * 0.7 < empty["read_bytes"] <= everything * 3 / 4, "all but the last layer's experts, once"
    assert warm["read_bytes"] < empty["read_bytes"]
    assert warm["hits"] > 0
    assert empty["hits"] == 0
    assert {"seconds_over_one_pass", "read_time_hidden", "speed_over_resident", "seconds_over_bound"} <= empty.keys()


def test_a_synthetic_container_is_the_same_each_time_and_stays_finite(container: Path, tmp_path: Path) -> None:
    again = make_container(tmp_path / "again.qpack", {**QWEN35_35B, **SMALL}, dtype=mx.float32)
    for path in sorted(container.rglob("layer_*.bin")):
        assert path.read_bytes() == (again / path.relative_to(container)).read_bytes()
    from swiftlet_mlx.loader import load_streamed

    model, _ = load_streamed(again, cache_gb=0.001)
    logits = model(mx.array([bench.prompt(40, 256)]))
    assert bool(mx.isfinite(logits).all())
    assert float(logits.std()) > 1e-3
    model.pools.close()
