"""One process loads a model, reads a long prompt and holds a long conversation within what its plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_checkpoint

PROGRAM = """
import json, sys
from pathlib import Path
import mlx.core as mx
from swiftlet_bench.process import now_bytes, peak_bytes
from swiftlet_mlx import load, memory
from swiftlet_mlx.checkpoint import open_checkpoint
from swiftlet_mlx.completion import Ask
from swiftlet_mlx.sampling import Sampling
from swiftlet_mlx.session import Session

folder = Path(sys.argv[1])
opened = open_checkpoint(folder)
plan = memory.plan(opened, opened.tables, json.loads((folder / "config.json").read_text()), cache_gb=0.001)
found = {"plan": plan.process_total, "early": 0}
ask = Ask(sampling=Sampling(min_tokens=4), max_tokens=4)
with Session(*load(folder, cache_gb=0.001), ask=ask, prefix_cache_gb=0.003) as session:
    list(session.send("word " * 400))
    found["prompt"] = len(session.completions.render(session.messages).ids)
    session.reset()
    for turn in range(50):
        list(session.send(f"and {turn}?"))
        found["early"] = found["early"] or (now_bytes() if turn == 10 else 0)
    found["late"] = now_bytes()
    store = session.engine.store
    found["kept"] = session.engine.call(lambda: store.nbytes).result()
    found["budget"] = store.budget_bytes
found["peak"] = peak_bytes()
found["mlx_cache_limit_is_ours"] = mx.set_cache_limit(0) == memory.MLX_CACHE_BYTES
print(json.dumps(found))
"""


@pytest.mark.long
def test_a_long_prompt_and_fifty_turns_stay_within_the_plan(tmp_path: Path) -> None:
    shape = {"layers": 2, "experts": 8, "top_k": 2, "hidden": 32}
    folder = make_checkpoint(tmp_path / "model", tokenizer=True, shape=shape, full_attention_interval=2)
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        check=True, capture_output=True, text=True, env={**os.environ, "MLX_DISABLE_COMPILE": "1"},
    )  # fmt: skip
    found = json.loads(out.stdout)
    assert found["prompt"] >= 2000
    assert found["peak"] <= found["plan"], found
    assert found["late"] - found["early"] < 8_000_000, f"forty turns more take no memory of their own: {found}"
    assert 0 < found["kept"] <= found["budget"]
    assert found["mlx_cache_limit_is_ours"], "nobody has lifted the bound on freed buffers"
