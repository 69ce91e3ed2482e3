"""Beside a running command: the hot list, recorded routes, memory that is asked for and given back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny import make_checkpoint

from swiftlet_mlx import warm
from swiftlet_mlx.cli.care import cache_folder, cared_for
from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import OptionError
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.route_file import read_routes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("care") / "model", kind="qwen3_moe", bits=4)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(lambda: (load_streamed(folder, cache_gb=0.00008)[0], None)) as engine:
        yield engine


def decode(engine: Engine, tokens: range = range(12)) -> list[int]:
    def run() -> list[int]:
        cache, out = make_prompt_cache(engine.model), []
        for token in tokens:
            out.append(int(mx.argmax(engine.model(mx.array([[token]]), cache=cache)).item()))
        return out

    return engine.call(run).result(60)


def test_what_was_used_is_remembered_for_the_next_start(engine: Engine, folder: Path) -> None:
    with cared_for(engine, folder):
        decode(engine)
    (found,) = (cache_folder() / "hot").iterdir()
    uses = warm.read(found, warm.model_hash(folder))
    assert sum(sum(layer.values()) for layer in uses.values()) == 12 * 4 * 2
    with Engine(lambda: (load_streamed(folder, cache_gb=0.00008)[0], None)) as again, cared_for(again, folder):
        again.call(lambda: None).result(10)
        while again.model.pools._threads._idling.locked():  # the user is still typing
            time.sleep(0.001)
        decode(again)
        assert again.model.pools.stats.misses < engine.model.pools.stats.misses


def test_without_warm_nothing_is_kept(engine: Engine, folder: Path) -> None:
    with cared_for(engine, folder, warm=False):
        decode(engine)
    assert not cache_folder().exists()


def test_a_folder_that_cannot_be_written_keeps_no_command_from_ending(
    engine: Engine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with cared_for(engine, folder):
        decode(engine)


def test_routes_are_recorded_while_it_lasts(engine: Engine, folder: Path, tmp_path: Path) -> None:
    with cared_for(engine, folder, routes=tmp_path / "routes"):
        decode(engine)
    decode(engine)
    info, routes = read_routes(tmp_path / "routes")
    assert info.layers == (0, 1, 2, 3)
    assert (info.experts, info.top_k) == (8, 2)
    assert len(routes) == 12 * 4


def test_a_route_file_that_cannot_be_written_is_told(engine: Engine, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), cared_for(engine, folder, routes=tmp_path / "no" / "routes"):
        raise AssertionError("the command must not begin")


def test_no_thread_is_left(engine: Engine, folder: Path) -> None:
    engine.wait()
    before = {t.name for t in threading.enumerate()}
    with cared_for(engine, folder):
        decode(engine)
        assert "memory-pressure" in {t.name for t in threading.enumerate()}
    left = {t.name for t in threading.enumerate()} - before
    assert "memory-pressure" not in left


def test_an_engine_that_failed_to_load_ends_the_care(folder: Path) -> None:
    def fail() -> Any:
        raise OSError("no such disk")

    with Engine(fail) as engine:
        with pytest.raises(Exception, match="no such disk"):
            engine.wait()
        with pytest.raises(Exception, match="could not be loaded"), cared_for(engine, folder):
            pass


def test_an_engines_memory_can_be_changed_while_it_runs(engine: Engine, folder: Path) -> None:
    engine.wait()
    expected = decode(engine)
    pools = engine.model.pools
    for gb in (0.00005, 0.0001, 0.00002):
        engine.set_cache_gb(gb)
        assert decode(engine) == expected
        assert pools.nbytes <= gb * 1e9
    engine.set_cache_gb(5)
    engine.call(lambda: None).result(10)
    assert pools.nbytes == sum(t.expert_count * t.payload_bytes for t in pools.source.tables.values())
    for bad in (0, -1, float("nan"), 1e9):
        with pytest.raises(OptionError, match="cache_gb"):
            engine.set_cache_gb(bad)
