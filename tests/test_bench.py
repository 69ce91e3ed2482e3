"""Measuring one model: what a run reports, the page of a model, the machine it ran on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench_models import TINY, tiny
from swiftlet_bench import machine, page, pagecache, predict, process, prompts
from swiftlet_bench.subject import opened
from swiftlet_bench.synthetic import make_checkpoint

from swiftlet_mlx.errors import OptionError


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("bench"))


# ---- a subject


def test_a_run_generates_as_many_tokens_as_asked_and_reports_its_own_share(container: Path) -> None:
    with opened(container, cache_gb=0.0001) as subject:
        first, second = (subject.run(subject.prompt(20, seed), 12) for seed in (1, 1))
        setting = subject.setting(subject.prompt(20, 1), 12, 2, 0)
    for values in (first, second):
        assert values["generated_tokens"] == 12
        assert values["ttft_seconds"] > 0
        assert values["peak_bytes"] > 20e6
        assert values["p95_token_seconds"] <= values["slowest_token_seconds"]
        assert values["read_backs_per_token"] == 4
        assert 0 <= values["hit_rate"] < 1
    assert len(subject.last_ids) == 12
    assert setting.cache_bytes <= 100_000
    assert setting.prompt_hash == prompts.digest(subject.prompt(20, 1)) != prompts.digest(subject.prompt(20, 2))
    assert setting.synthetic


def test_stock_mlx_lm_is_measured_the_same_way_and_says_the_same(tmp_path: Path, container: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "stock", **TINY)
    said = []
    for folder, stock in ((checkpoint, True), (container, False)):
        with opened(folder, cache_gb=0.00005, stock=stock) as subject:
            values = subject.run(subject.prompt(16), 10)
            said.append(subject.last_ids)
            assert subject.setting([1], 1, 1, 0).engine == ("mlx-lm" if stock else "swiftlet-mlx")
            assert values["decode_tokens_per_second"] > 0
    assert said[0] == said[1]
    with pytest.raises(OptionError, match="checkpoint"), opened(container, stock=True):
        pass


def test_a_page_measures_every_length_and_decoding_in_turn(container: Path) -> None:
    order: list[str] = []
    rows, sizes = page.measure(
        container,
        page.Plan(lengths=(8, 24), tokens=6, rounds=2, warm_up=1),
        cache_gb=0.0002,
        progress=lambda done, total, what: order.append(what),
    )
    assert order == [*["decode", "prefill 8", "prefill 24"] * 3, "done"]
    assert [row.case for row in rows] == ["decode", "prefill 8", "prefill 24"]
    assert [row.setting.prompt_tokens for row in rows] == [32, 8, 24]
    assert all(row.values["ttft_seconds"].n == 2 for row in rows)
    assert sizes["expert_bytes"] == predict.shape_here(container).expert_bytes


# ---- the machine


def test_the_machine_is_described_without_naming_its_owner() -> None:
    here = machine.machine()
    assert here.cores == os.cpu_count()
    assert here.memory_bytes > 1e8
    assert here.backend == "cpu"
    assert here.slug == here.slug.lower()
    assert " " not in here.slug
    import platform

    assert platform.node() not in str(here) or not platform.node()
    assert machine.versions()["mlx"].startswith("0.")
    assert machine.commit()


def test_the_peak_of_a_process_can_be_reset_and_sees_an_allocation() -> None:
    if not process.reset_peak():
        pytest.skip("this system cannot reset a process's peak")
    before = process.peak_bytes()
    block = bytearray(60_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert process.peak_bytes() > before + 50_000_000
    del block
    assert process.now_bytes() < before + 30_000_000
    process.reset_peak()
    assert process.peak_bytes() < before + 30_000_000


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
def test_a_model_is_dropped_from_the_page_cache_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(3_000_000))
    try:
        pagecache.evict(tmp_path)
    except pagecache.CannotEvict:
        pytest.skip("this file system keeps its files in memory")
    assert pagecache.cached_share(tmp_path) == 0
    assert pagecache.state(0) == "cold"
    path.read_bytes()
    assert pagecache.cached_share(tmp_path) == 1
    assert [pagecache.state(x) for x in (1.0, 0.5, None)] == ["warm", "part", "unknown"]


def test_prompts_are_the_same_everywhere_and_differ_by_seed() -> None:
    assert prompts.digest(prompts.ids(50, 1000, None, 1)) == "3b9fc4eb06d7"
    assert prompts.text(12).endswith(".")
    assert prompts.text(40, 1) != prompts.text(40, 2)
    assert len(prompts.ids(7, 10)) == 7
    assert max(prompts.ids(500, 10)) < 10
