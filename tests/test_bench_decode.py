"""The decode benchmark: its lines say what was measured, on a model small enough to measure here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swiftlet_bench import decode
from swiftlet_bench.shapes import preset
from swiftlet_bench.synthetic import make_container

from swiftlet_mlx.qpack import open_container


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import mlx.core as mx

    return make_container(
        tmp_path_factory.mktemp("bench") / "tiny.qpack", preset("tiny"), dtype=mx.float32, group_size=32
    )


def test_every_share_and_stock_are_measured_in_turn(
    container: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    decode.main(
        [str(container), "--shares", "0.25", "1", "--tokens", "3", "--rounds", "1", "--stock", "--output", str(out)]
    )
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    setting, part, whole, stock = lines
    assert setting["case"] == "setting"
    assert (part["case"], whole["case"], stock["case"]) == (0.25, 1.0, "stock")
    opened = open_container(container)
    layers = len(opened.layers)
    assert part["read_backs"] == layers
    assert whole["read_backs"] == whole["misses"] == 0
    assert 0 < part["hit_rate"] < 1
    expert = next(iter(opened.layers.values())).payload_bytes
    assert part["read_bytes"] == pytest.approx(part["misses"] * expert)
    assert part["cache_bytes"] <= 0.25 * opened.expert_bytes
    assert part["reads_alone_seconds"] > 0
    assert part["over_bound"] > 0
    assert whole["over_resident"] == 1.0
    assert all(line["n"] == 3 for line in lines[1:])


def test_stock_without_every_expert_resident_is_refused(container: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.main([str(container), "--shares", "0.5", "--stock"])
    assert "--stock needs" in capsys.readouterr().err
