"""What loading costs: dense weights, the pool, and little else. Experts are never read in full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_config

from swiftlet_mlx.safetensors import build_header, tensor_bytes

MEASURE = """
import json, resource, sys
from pathlib import Path
import mlx.core as mx
from swiftlet_mlx.loader import load_streamed
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
model, _ = load_streamed(Path(sys.argv[1]), cache_gb=0.02)
loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
mx.eval(model(mx.array([list(range(64))])))
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if sys.argv[1] in line] \
    if Path("/proc/self/maps").exists() else []
print(json.dumps({"loaded": loaded - before, "used": used - before, "pool": model.pools.nbytes, "mapped": mapped}))
"""


@pytest.mark.long
def test_loading_costs_dense_weights_and_pool_and_maps_no_file(tmp_path: Path) -> None:
    hidden, inner, experts, layers, vocab = 512, 256, 32, 6, 8192
    config = make_config("qwen3_moe", layers=layers, experts=experts, hidden=hidden, vocab=vocab)
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": inner}))
    tensors = [("model.embed_tokens.weight", (vocab, hidden)), ("lm_head.weight", (vocab, hidden))]
    tensors += [("model.norm.weight", (hidden,))]
    for n in range(layers):
        at = f"model.layers.{n}"
        tensors += [(f"{at}.{name}.weight", (hidden,)) for name in ("input_layernorm", "post_attention_layernorm")]
        tensors += [(f"{at}.self_attn.{name}.weight", (32,)) for name in ("q_norm", "k_norm")]
        tensors += [(f"{at}.self_attn.q_proj.weight", (128, hidden)), (f"{at}.self_attn.o_proj.weight", (hidden, 128))]
        tensors += [(f"{at}.self_attn.{name}.weight", (64, hidden)) for name in ("k_proj", "v_proj")]
        tensors += [(f"{at}.mlp.gate.weight", (experts, hidden))]
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            tensors.append((f"{at}.mlp.switch_mlp.{name}_proj.weight", (experts, *shape)))
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(build_header([(name, "F32", shape) for name, shape in tensors]))
        for _, shape in tensors:
            file.truncate(file.seek(tensor_bytes("F32", shape), os.SEEK_CUR))
    experts_bytes = sum(tensor_bytes("F32", shape) for name, shape in tensors if "switch_mlp" in name)
    dense_bytes = sum(tensor_bytes("F32", shape) for name, shape in tensors) - experts_bytes
    assert experts_bytes > 300e6
    out = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], check=True, capture_output=True, text=True)
    found = json.loads(out.stdout)
    assert found["pool"] <= 20e6
    assert found["mapped"] == []
    assert found["loaded"] < dense_bytes + found["pool"] + 150e6
    assert found["used"] < dense_bytes + found["pool"] + 200e6
