"""The disk, and what it and a model's shape let one expect."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from bench_models import TINY, tiny
from swiftlet_bench import forecast, io, io_choice, predict, rates, shapes
from swiftlet_bench.harness import Spread
from swiftlet_bench.rates import Rates

from swiftlet_mlx.errors import ReadFailed


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("bench"))


# ---- the disk


def test_io_reads_no_byte_twice_and_reports_every_combination(tmp_path: Path) -> None:
    with io.sample_file(tmp_path, 4_000_000) as path:
        results = io.measure(path, sizes=(65_536, 262_144), threads=(1, 2), rounds=2, case_bytes=1_000_000)
        assert {(r.case.read_bytes, r.case.threads, r.case.cold) for r in results} == {
            (size, n, cold) for size in (65_536, 262_144) for n in (1, 2) for cold in (True, False)
        }
        assert all(r.bytes_per_second.low > 0 and r.bytes_per_second.n == 2 for r in results)
        assert all(r.median_seconds.low <= r.p99_seconds.high for r in results)
        assert io.bandwidth(results, 300_000) > 0
        with pytest.raises(ReadFailed, match="larger file"):
            io.measure(path, sizes=(1 << 30,), threads=(1,), rounds=1)
    assert not path.exists()
    with pytest.raises(ValueError):
        io.bandwidth([], 1)


def test_both_ways_of_reading_are_compared_on_bytes_that_nobody_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    ways: list[tuple[bool, bool]] = []

    def timed(path: Path, places: list[int], read_bytes: int, threads: int, **how: bool) -> dict[str, float]:
        seen.extend(places)
        ways.append((how["past_the_cache"], how["forget"]))
        return {"bytes_per_second": 2.0 if how["forget"] else 1.0, "median_seconds": 0.0, "p99_seconds": 0.0}

    (tmp_path / "f").write_bytes(bytes(1000))
    monkeypatch.setattr(io, "timed", timed)
    found = io_choice.measure(tmp_path / "f", 100, rounds=2)
    assert ways == [(False, False), (True, True)] * 2
    assert len(seen) == len(set(seen)) == 8
    assert found.direct_times.values == (2.0, 2.0)
    assert found.io == "direct"
    with pytest.raises(ReadFailed, match="do not fit"):
        io_choice.measure(tmp_path / "f", 300, rounds=2)


def test_a_direct_read_gives_its_pages_back(tmp_path: Path) -> None:
    with io.sample_file(tmp_path, 2_000_000) as path:
        done = io.timed(path, [0, 65_536], 65_536, 2, past_the_cache=True, forget=True)
        assert done["bytes_per_second"] > 0
        assert io_choice.measure(path, 65_536, rounds=1).io in ("cached", "direct")


@pytest.mark.parametrize(
    ("times", "io"), [((1.2, 1.3, 1.2), "direct"), ((0.9, 1.9, 1.9), "cached"), ((1.1, 1.1, 1.1), "cached")]
)
def test_the_page_cache_is_given_up_only_for_a_clear_gain_in_every_round(times: tuple[float, ...], io: str) -> None:
    assert io_choice.Choice(Spread(times), Spread(times), Spread(times)).io == io


# ---- predictions


RATES = Rates(weights=100e9, read_back=0.3e-3)


def test_a_prediction_is_the_sum_of_its_terms() -> None:
    shape = predict.shape_of("qwen3.6-35b", shapes.preset("qwen3.6-35b"))
    p = predict.predict(shape, 4 * 10**9, RATES, disk=5e9)
    assert p.compute_seconds == pytest.approx((shape.dense_bytes + shape.cycle_bytes) / 100e9)
    assert p.host_seconds == pytest.approx(40 * (0.3e-3 + predict.HOST_SECONDS))
    assert p.read_seconds == pytest.approx(shape.cycle_bytes * (1 - p.hit_rate) / 5e9)
    assert p.tokens_per_second == pytest.approx(1 / (p.compute_seconds + p.host_seconds + p.read_seconds))


def test_more_cache_never_predicts_less_and_everything_resident_reads_nothing() -> None:
    shape = predict.shape_of("qwen3-next-80b", shapes.preset("qwen3-next-80b"))
    found = [predict.predict(shape, n * 10**9, RATES, 3e9) for n in (1, 2, 4, 8, 16, 32, 64)]
    speeds = [p.tokens_per_second for p in found]
    assert speeds == sorted(speeds)
    assert found[-1].read_bytes == 0
    assert found[-1].host_seconds == RATES.read_back


@pytest.mark.parametrize(("x", "y"), [(0, 0), (0.25, 0.5), (0.5, 1), (0.9, 1)])
def test_the_curve_is_read_between_its_points(x: float, y: float) -> None:
    assert predict.interpolate([(0.0, 0.0), (0.5, 1.0)], x) == pytest.approx(y)


def test_a_shape_from_files_agrees_with_the_shape_from_the_config(container: Path) -> None:
    here = predict.shape_here(container)
    said = predict.shape_of("tiny", TINY["config"], bits=4, group_size=32)
    assert (here.layers, here.experts, here.top_k) == (said.layers, said.experts, said.top_k)
    assert here.expert_bytes == 3 * 64 * 32 * (4 / 8 + 8 / 32)  # float32 scales and biases
    assert predict.width_here(container) == (4, "F32")


def test_rates_are_of_the_size_of_the_work() -> None:
    small = rates.weight_rate(4, mx.float32, 2 << 20)
    assert 1e6 < small < 1e13
    assert 0 < rates.read_back_seconds(5) < 1


def test_a_forecast_is_of_the_models_own_files_and_width(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(rates, "measure", lambda *width: asked.append(width) or RATES)
    here = forecast.measure(container, cold=False)
    assert asked == [(4, mx.float32)]
    assert here.disk > 0
    assumed, own = here.at(100_000), here.at(100_000, hit_rate=0.25)
    assert (assumed.assumed, own.assumed, own.hit_rate) == (True, False, 0.25)
    assert own.read_seconds == pytest.approx(here.shape.cycle_bytes * 0.75 / here.disk)
    report = here.report([assumed, own])
    assert [p["tokens_per_second"] for p in report["predictions"]] == [p.tokens_per_second for p in (assumed, own)]
    assert "page cache" in here.in_words()
    assert forecast.measure(container, disk=3e9).disk == 3e9
