"""Results are comparable or refused, never without spread, and the same numbers everywhere they are written."""

from __future__ import annotations

import getpass
import json
import platform
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swiftlet_bench import report, studies
from swiftlet_bench.harness import (
    NotComparable,
    Setting,
    Spread,
    check_comparable,
    collect,
    in_turn,
    ratio,
)
from swiftlet_bench.report import ResultsError, Row

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
SETTING = Setting(
    machine="some-chip-8gb-cpu", chip="Some Chip", system="Linux 6.1 x86_64", backend="cpu", device="cpu",
    memory_bytes=8 << 30, versions="mlx=1", commit="abc", engine="swiftlet-mlx", model="m.qpack", model_hash="0123",
    synthetic=True, cache_bytes=5_000_000, threads=8, io="cached", page_cache="warm", prompt_tokens=32,
    prompt_hash="4567", max_tokens=64, warm_up=1, n=3,
)  # fmt: skip


def row(*speeds: float, case: str = "decode", **changes: object) -> Row:
    values = {
        "decode_tokens_per_second": Spread(speeds or (10.0, 11.0, 12.0)),
        "prefill_tokens_per_second": Spread((100.0, 101.0, 102.0)),
        "ttft_seconds": Spread((0.1,)),
        "hit_rate": Spread((0.5,)),
        "read_bytes_per_token": Spread((1e6,)),
        "prefill_read_bytes": Spread((2e6,)),
        "peak_bytes": Spread((1e9,)),
    }
    return Row(case, replace(SETTING, **changes), values, "2026-12-01")  # type: ignore[arg-type]


# ---- comparing


@pytest.mark.parametrize("name", [f.name for f in fields(Setting)])
def test_any_difference_of_setting_forbids_a_comparison(name: str) -> None:
    value = getattr(SETTING, name)
    other = replace(SETTING, **{name: not value if isinstance(value, bool) else value * 2})
    with pytest.raises(NotComparable, match=name):
        check_comparable([SETTING, other])
    check_comparable([SETTING, other], [name])


def test_a_setting_that_does_not_exist_cannot_vary() -> None:
    with pytest.raises(ValueError, match="moon"):
        check_comparable([SETTING], ["moon"])


def test_cases_take_turns_and_warm_up_rounds_do_not_count() -> None:
    order: list[str] = []
    prepared: list[str] = []

    def case(name: str, value: float) -> dict[str, float]:
        order.append(name)
        return {"speed": value * len(order)}

    found = in_turn(
        {"a": lambda: case("a", 1), "b": lambda: case("b", 10)}, rounds=2, warm_up=1, before_each=prepared.append
    )
    assert order == prepared == ["a", "b"] * 3
    assert found["a"]["speed"].values == (3, 5)
    assert found["b"]["speed"].values == (40, 60)


def test_a_case_that_measures_something_else_each_time_is_refused() -> None:
    with pytest.raises(ValueError, match="same quantities"):
        collect([{"a": 1.0}, {"b": 1.0}])
    for wrong in ({"rounds": 0}, {"rounds": 1, "warm_up": -1}):
        with pytest.raises(ValueError):
            in_turn({"a": lambda: {"x": 1.0}}, **wrong)
    with pytest.raises(ValueError):
        Spread(())


def test_ratios_are_taken_round_by_round() -> None:
    slow_machine_in_round_two = ratio(Spread((20.0, 2.0, 22.0)), Spread((10.0, 1.0, 11.0)))
    assert slow_machine_in_round_two.values == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError):
        ratio(Spread((1.0,)), Spread((1.0, 2.0)))


@given(st.lists(st.floats(0.001, 1e9), min_size=1, max_size=9))
def test_the_median_lies_in_the_spread(values: list[float]) -> None:
    spread = Spread(tuple(values))
    assert spread.low <= spread.median <= spread.high
    assert spread.n == len(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((10.0, 10.1, 9.9), []),
        ((10.0, 10.1), ["only 2 runs"]),
        ((10.0,), ["only 1 run"]),
        ((10.0, 14.0, 10.0), ["noisy"]),
        ((10.0, 9.4, 8.8), ["drifting"]),
        ((10.0, 8.0, 6.0), ["noisy", "drifting"]),
    ],
)
def test_few_noisy_and_drifting_runs_are_flagged(values: tuple[float, ...], words: list[str]) -> None:
    flags = Spread(values).flags()
    assert len(flags) == len(words)
    assert all(word in flag for word, flag in zip(words, flags, strict=True))


# ---- writing down


def test_csv_keeps_every_setting_and_median_with_its_spread(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.csv"
    report.append_csv(path, [row()])
    report.append_csv(path, [row(20.0, 20.0, 20.0, cache_bytes=7)])
    first, second = report.read_csv(path)
    assert {k: str(v) for k, v in report.flat(row()).items()} == {k: v for k, v in first.items() if v} | {
        "flags": first["flags"]
    }
    assert (first["decode_tokens_per_second"], first["decode_tokens_per_second_low"]) == ("11", "10")
    assert first["decode_tokens_per_second_high"] == "12"
    assert second["cache_bytes"] == "7"
    assert set(report.SETTINGS) <= set(first)


def test_csv_of_other_columns_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("date,speed\n1,2\n")
    with pytest.raises(ResultsError, match="columns"):
        report.append_csv(path, [row()])
    with pytest.raises(ResultsError):
        report.read_csv(path)
    assert path.read_text() == "date,speed\n1,2\n"


def test_json_has_shared_settings_once_and_the_rest_with_each_case() -> None:
    found = json.loads(report.to_json([row(), row(case="big", cache_bytes=9)], sizes={"expert_bytes": 5}))
    assert found["model"] == "m.qpack"
    assert found["synthetic"] is True
    assert found["sizes"] == {"expert_bytes": 5}
    assert [case["cache_bytes"] for case in found["cases"]] == [5_000_000, 9]
    assert found["cases"][0]["decode_tokens_per_second"] == 11
    assert found["cases"][0]["spread"]["decode_tokens_per_second"] == [10, 12]


def test_random_weights_are_marked_wherever_their_numbers_appear(tmp_path: Path) -> None:
    report.append_csv(tmp_path / "r.csv", [row()])
    assert "synthetic (random weights)" in report.share([row()])
    assert "synthetic (random weights)" in report.results_table(tmp_path)
    assert "synthetic" not in report.share([row(synthetic=False)])


def test_a_block_to_share_names_no_person_and_no_folder() -> None:
    block = report.share([row()])
    assert block.startswith("```\n")
    assert block.endswith("```\n")
    for private in (platform.node(), str(Path.home()), getpass.getuser() + "/"):
        assert not private or private not in block
    assert "noisy" in report.share([row(1.0, 2.0, 3.0)])


def test_the_table_takes_the_newest_row_of_each_setting(tmp_path: Path) -> None:
    old, new = row(1.0, 1.0, 1.0), replace(row(2.0, 2.0, 2.0), date="2026-12-02")
    report.append_csv(tmp_path / "r.csv", [new, old, row(cache_bytes=0, engine="mlx-lm")])
    lines = report.results_table(tmp_path).splitlines()
    assert len(lines) == 4
    assert [line.split("|")[6].strip() for line in lines[2:]] == ["11 (10-12), noisy, drifting", "2 (2-2)"]
    assert any("| all |" in line for line in lines)


def test_the_table_says_which_rows_are_not_to_be_trusted(tmp_path: Path) -> None:
    noisy = row(10.0, 14.0, 10.0)
    warm = replace(
        row(7.0, 7.0, 7.0, cache_bytes=9), values={**row(7.0, 7.0, 7.0).values, "throttled": Spread((0.0, 1.0))}
    )
    report.append_csv(tmp_path / "r.csv", [noisy, warm])
    cells = [line.split("|")[6].strip() for line in report.results_table(tmp_path).splitlines()[2:]]
    assert cells == ["7 (7-7), throttled by heat", "10 (10-14), noisy"]
    assert "throttled by heat: 1 of 2 runs" in report.share([warm])


def test_the_table_shows_the_longest_prompt_of_the_same_page(tmp_path: Path) -> None:
    def prompt(n: int, speed: float) -> Row:
        values = {"prefill_tokens_per_second": Spread((speed,)), "peak_bytes": Spread((1.0,))}
        return Row(f"prefill {n}", replace(SETTING, prompt_tokens=n), values, "2026-12-01")

    report.append_csv(tmp_path / "r.csv", [row(), prompt(512, 7.0), prompt(128, 9.0)])
    (line,) = report.results_table(tmp_path).splitlines()[2:]
    assert "| 7 at 512 |" in line


def test_caches_are_ordered_by_size(tmp_path: Path) -> None:
    report.append_csv(tmp_path / "r.csv", [row(cache_bytes=n) for n in (5_000_000, 900, 70_000)])
    lines = report.results_table(tmp_path).splitlines()[2:]
    assert [line.split("|")[4].strip() for line in lines] == ["900 B", "70.0 kB", "5.00 MB"]


@pytest.mark.parametrize("name", ["results", "studies"])
def test_a_table_goes_between_the_markers_and_nowhere_else(name: str) -> None:
    begin, end = report.BEGIN.format(name), report.END.format(name)
    text = f"a\n{begin}\nold\n{end}\nz\n"
    assert report.put_between_markers(text, "new\n", name) == f"a\n{begin}\nnew\n{end}\nz\n"
    for wrong in ("", text + text, f"{end}{begin}"):
        with pytest.raises(ResultsError, match=name):
            report.put_between_markers(wrong, "new", name)


@pytest.mark.parametrize("page", ["bench/README.md", "README.md"])
def test_the_pages_show_the_results_that_are_kept(page: str) -> None:
    text = expected = (ROOT / page).read_text()
    made = {"results": report.results_table(RESULTS), "studies": studies.tables(RESULTS)}
    shown = [name for name in made if report.BEGIN.format(name) in text]
    for name in shown:
        expected = report.put_between_markers(expected, made[name], name)
    assert shown
    assert text == expected, f"run: python -m swiftlet_bench table --into {page}"


def test_results_that_are_kept_are_readable_and_from_known_code() -> None:
    files = sorted(RESULTS.glob("*.csv"))
    assert files
    for path in files:
        rows = report.read_csv(path)
        assert rows
        for one in rows:
            assert one["machine"] == path.stem
            assert one["commit"]
            assert "/" not in one["model"]
