"""The conversation benchmark runs on a container it is given, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from swiftlet_bench import conversation as bench
from swiftlet_bench.shapes import preset
from swiftlet_bench.synthetic import make_container


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = preset("tiny", layers=4, experts=10, vocab=300)
    return make_container(
        tmp_path_factory.mktemp("bench") / "tiny.qpack", shape, bits=None, dtype=mx.float32, tokenizer=True
    )


def lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    bench.run(arguments)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_later_turn_stands_beside_a_bare_prompt_of_its_length(
    container: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lines([str(container), "--first-tokens", "100", "--question-words", "4", "--max-tokens", "6",
                   "--rounds", "1"], capsys)  # fmt: skip
    by_case: dict[str, dict[str, Any]] = {line["case"]: line for line in found}
    first = by_case["first turn"]
    assert first["prompt_tokens"] >= 100
    assert first["generated_tokens"] == 6
    bare = by_case["bare prompt: read_tokens"]["median"]
    for kind in ("second turn", "second turn, prepared"):
        read = by_case[f"{kind}: read_tokens"]["median"]
        # The answer comes back as the same tokens, so only the end of its turn is read beside the question.
        assert bare - 4 <= read <= bare + 13, "less than the hundred of the first turn"
        for what in ("ttft_seconds", "cpu_seconds"):
            assert by_case[f"{kind}: {what}"]["median"] > 0
            assert by_case[f"{kind} / bare prompt: {what}"]["n"] == 1
    assert by_case["file_bytes"]["median"] > 1000
    assert by_case["reopened: read_tokens"]["value"] <= bare
    assert by_case["checkpoint seconds"]["n"] == bench.N_CHECKPOINTS


def test_many_turns_are_held_and_the_oldest_go_when_the_context_is_full(
    container: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftlet_mlx.context.longest", lambda model, free: (160, "model"))
    found = lines([str(container), "--rounds", "0", "--turns", "8", "--max-tokens", "3"], capsys)
    turns = [line for line in found if line["case"] == "turns"]
    assert [t["turn"] for t in turns] == list(range(1, 9))
    assert all(t["context"] <= 160 and t["store_bytes"] <= t["store_budget_bytes"] for t in turns)
    assert turns[-1]["dropped"] > 0
    assert turns[1]["read"] < turns[1]["context"], "what was read once is not read again"


def test_only_what_comes_back_as_the_same_tokens_is_said(container: Path) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer: Any = load_tokenizer(container)
    n = len(tokenizer)
    scores = bench.Readable(tokenizer, n)([], mx.zeros((n,)))
    said = [i for i in range(n) if scores[i].item() == 0.0]
    assert 20 < len(said) < n
    assert tokenizer.encode(tokenizer.decode(said), add_special_tokens=False) == said
