"""The Swiftlet project's own tiny checkpoints: real input that nobody here wrote. Skipped where they are absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from swiftlet_repack.verify import verify
from swiftlet_repack.write import repack_checkpoint

from swiftlet_mlx import memory
from swiftlet_mlx.checkpoint import open_checkpoint
from swiftlet_mlx.cli.app import app
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.oracle import compare

ROOT = Path(os.environ.get("SWIFTLET_FIXTURES", Path(__file__).parents[2] / "shared" / "fixtures" / "swiftlet"))
NAMES = ["tiny-model", "tiny-model-q4", "tiny-model-q35"]
PROMPT = [1, 5, 9, 42, 7, 99, 3, 17, 64, 2]
pytestmark = pytest.mark.skipif(
    not ROOT.is_dir(), reason="Swiftlet's fixtures are not here; set SWIFTLET_FIXTURES to their folder"
)


def smallest(folder: Path) -> float:
    checkpoint = open_checkpoint(folder)
    return memory.minimum_bytes(checkpoint.tables, checkpoint.shape.top_k) / memory.GB


@pytest.mark.parametrize("name", NAMES)
def test_containers_hold_their_source_byte_for_byte(name: str, tmp_path: Path) -> None:
    container = repack_checkpoint(ROOT / name, tmp_path / "model.qpack")
    found = verify(container, ROOT / name)
    assert found.hashed_files > 10
    assert found.compared_bytes > 400_000


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_finds_no_difference(name: str, tmp_path: Path) -> None:
    container = repack_checkpoint(ROOT / name, tmp_path / "model.qpack")
    found = compare(container, ROOT / name, PROMPT, n_tokens=32, cache_gb=smallest(ROOT / name))
    assert found.exact
    assert found.agrees


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_ids_of_stock_mlx_lm(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock, _ = load_model(ROOT / name)
    expected = [int(token) for token, _ in generate_step(mx.array(PROMPT), stock, max_tokens=32)]
    container = repack_checkpoint(ROOT / name, tmp_path / "model.qpack")
    ids = ",".join(map(str, PROMPT))
    for model, extra in ((container, ["--cache-gb", f"{smallest(ROOT / name):.9f}"]), (ROOT / name, [])):
        assert run(app, ["generate", str(model), "--ids", ids, "--max-tokens", "32", "--json", *extra]) == 0
        assert json.loads(capsys.readouterr().out)["ids"] == expected, model
