"""Studies made on lent machines, as they came, become tables that say where each number is from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swiftlet_bench import studies
from swiftlet_bench.report import ResultsError

RESULTS = Path(__file__).parent.parent / "bench" / "results"


def study(folder: Path, name: str, *lines: dict[str, object]) -> str:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return studies.tables(folder)


STEP = {
    "case": 0.25, "n": 12, "tokens_per_second": 20.0, "step_seconds": 0.05, "p10_seconds": 0.04, "p90_seconds": 0.1,
    "cache_bytes": 2_000_000_000, "hit_rate": 0.375, "read_bytes": 165_000_000.0, "wait_seconds": 0.011,
    "over_resident": 3.5, "over_bound": 1.2,
}  # fmt: skip


FLAT = dict.fromkeys(("n", "tokens_per_second", "step_seconds", "p10_seconds", "p90_seconds"), 1)


def table(folder: Path, name: str, *lines: dict[str, object]) -> list[list[str]]:
    """The cells of the rows that these lines become."""
    made = study(folder, name, *lines).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in made[2:]]


def test_lines_of_a_decode_study_become_a_table(tmp_path: Path) -> None:
    first = {"case": "setting", "machine": "H200", "model": "35B shapes", "commit": "abc", "threads": 8}
    second = {**first, "variant": "without | advice"}
    whole = {**FLAT, "case": 1.0, "cache_bytes": 9e9, "hit_rate": 1.0, "read_bytes": 0.0, "wait_seconds": 0.0}
    rows = table(tmp_path, "2026-12-02-decode-h200.jsonl", first, STEP, second, whole, {**FLAT, "case": "stock"})
    assert {len(row) for row in rows} == {len(studies.DECODE)}
    assert rows[0] == [
        "H200", "35B shapes", "25%, 2.00 GB", "20 (10-25)", "38%", "165 MB/token", "11 ms/token", "3.50", "1.20", "12",
        "2026-12-02, abc, threads 8",
    ]  # fmt: skip
    assert rows[1][2:7] == ["100%, 9.00 GB", "1 (1-1)", "100%", "", ""]
    assert rows[1][-1].endswith("variant without / advice, threads 8")
    assert rows[2][2] == "all (stock)"


def test_lines_of_a_prefill_study_become_a_table(tmp_path: Path) -> None:
    streamed = {"case": "streamed", "seconds": 0.25, "read_bytes": 3e9, "pool": "empty"}
    rows = table(
        tmp_path,
        "2026-12-02-prefill-h200.jsonl",
        {"case": "resident", "tokens": 512, "layer_major_tokens_per_second": 8e3, "mlx_lm_tokens_per_second": 5e3},
        {"case": "setting", "machine": "H200", "model": "m", "commit": "abc"},
        {"case": "one pass", "bytes": 5, "seconds": 0.1},
        {**streamed, "tokens": 512, "tokens_per_second": 2044.0},
        {"case": "streamed", "tokens": 4096, "seconds": 0.5, "commit": "def", "cuda_memory_advice": True},
        {"case": "gated delta rule, chunked", "tokens": 2048, "seconds": 0.007},
    )
    assert [row[2:] for row in rows] == [
        ["resident", "512", "", "8000 layer by layer, 5000 mlx-lm's way", "1", "", "2026-12-02, abc"],
        ["streamed", "512", "0.25", "2044", "1", "3.00 GB", "2026-12-02, abc, pool empty"],
        ["streamed", "4096", "0.5", "8192", "1", "", "2026-12-02, def, cuda memory advice on"],
    ]


def test_a_file_says_what_holds_for_all_of_it_and_which_cases_are_shown(tmp_path: Path) -> None:
    rows = table(
        tmp_path,
        "2026-12-02-prefill-h200.jsonl",
        {"case": "about", "machine": "H200", "model": "m", "commit": "abc", "shown": ["good"]},
        {"case": "setting", "threads": 8},
        {"case": "tried", "tokens": 10, "seconds": 1.0},
        {"case": "good", "tokens": 10, "seconds": 2.0},
        {"case": "good", "tokens": 10, "seconds": 4.0},
        {"case": "good", "tokens": 20, "seconds": 4.0},
        {"case": "ratio", "tokens": 10},
    )
    assert rows == [
        ["H200", "m", "good", "10", "3 (2-4)", "3.75 (2.5-5)", "2", "", "2026-12-02, abc, threads 8"],
        ["H200", "m", "good", "20", "4", "5", "1", "", "2026-12-02, abc, threads 8"],
    ]


@pytest.mark.parametrize("text", ["", "x", "[1]", '{"case": 0.1}', '{"no": "case"}'])
def test_a_study_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "2026-12-02-decode-h200.jsonl").write_text(text)
    with pytest.raises(ResultsError, match="decode-h200"):
        studies.tables(tmp_path)


def test_every_study_that_is_kept_has_its_rows() -> None:
    text = studies.tables(RESULTS)
    for path in RESULTS.glob("*.jsonl"):
        if "-decode-" in path.name or "-prefill-" in path.name:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            setting = next(line for line in lines if line["case"] in ("about", "setting"))
            assert setting["model"] in text
            assert setting["commit"] in text
