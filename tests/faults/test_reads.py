"""Disks that fail: short reads go on, one EIO is forgiven, everything else is an error that names the place."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from steps import check_table
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx import pools
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.loader import load_streamed

STEPS = [1, 5, 9, 42, 7, 99, 3, 17]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "model", kind="qwen3_5_moe", bits=4)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[mx.array]:
    return decode(load_model(checkpoint)[0])


@pytest.fixture(params=["checkpoint", "container"])
def folder(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Path:
    if request.param == "checkpoint":
        return checkpoint
    repack_checkpoint(checkpoint, tmp_path / "model.qpack")
    return tmp_path / "model.qpack"


@pytest.fixture
def model(folder: Path) -> Iterator[Any]:
    model: Any = load_streamed(folder, cache_gb=0.0001, threads=3)[0]
    assert all(p.n_slots < p.table.expert_count for p in model.pools.layers.values())
    yield model
    model.pools.close()


def decode(model: Any) -> list[mx.array]:
    cache, out = make_prompt_cache(model), []
    for token in STEPS:
        out.append(model(mx.array([[token]]), cache=cache))
        mx.eval(out[-1])
    return out


def equal(a: list[mx.array], b: list[mx.array]) -> bool:
    return all(bool(mx.array_equal(x, y).item()) for x, y in zip(a, b, strict=True))


class Disk:
    """os.preadv with a fault: `fault(n, ask)` gets the number of the call and a way to do (part of) it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Callable[[int, Callable[..., int]], int]) -> None:
        self.calls = 0
        preadv = os.preadv

        def broken(fd: int, views: Any, offset: int) -> int:
            self.calls += 1

            def ask(limit: int | None = None) -> int:
                if limit is None:
                    return preadv(fd, views, offset)
                return preadv(fd, [views[0][:limit]], offset)

            return fault(self.calls, ask)

        monkeypatch.setattr(os, "preadv", broken)


def test_reads_of_a_few_bytes_at_a_time_are_continued(
    model: Any, expected: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, lambda n, ask: ask(1 if n % 3 == 0 else 97))
    assert equal(decode(model), expected)
    monkeypatch.undo()
    check_table(model)


def test_an_error_of_the_device_is_forgiven_once(
    model: Any, expected: list[mx.array], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(n: int, ask: Callable[..., int]) -> int:
        if n % 4 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return ask()

    disk = Disk(monkeypatch, fault)
    assert equal(decode(model), expected)
    assert disk.calls > 8


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADF, errno.ENOMEM])
def test_a_lasting_error_names_the_place_and_the_next_token_is_served(
    model: Any, expected: list[mx.array], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fault(n: int, ask: Callable[..., int]) -> int:
        if n > 5:
            raise OSError(error, os.strerror(error))
        return ask()

    Disk(monkeypatch, fault)
    with pytest.raises(ReadFailed) as caught:
        decode(model)
    text = str(caught.value)
    assert re.search(r"^model\S* layer \d+, expert \d+: \d+ of \d+ bytes read at offset \d+", text), text
    assert os.strerror(error) in text
    assert "swiftlet-mlx verify" in text
    monkeypatch.undo()
    check_table(model)
    assert equal(decode(model), expected)
    check_table(model)


def test_a_file_cut_while_open_is_an_error_and_no_stale_expert(
    checkpoint: Path, expected: list[mx.array], tmp_path: Path
) -> None:
    folder = tmp_path / "model.qpack"
    repack_checkpoint(checkpoint, folder)
    model: Any = load_streamed(folder, cache_gb=0.0001)[0]
    assert equal(decode(model), expected)
    path = folder / model.pools.source.tables[2].file_name
    whole = path.read_bytes()
    os.truncate(path, 100)
    for pool in model.pools.layers.values():
        pool.resize(1)  # nearly everything must be read anew
    with pytest.raises(ReadFailed, match=r"layer_02.*layer 2.*the file ends there"):
        decode(model)
    path.write_bytes(whole)
    check_table(model)
    assert equal(decode(model), expected)
    model.pools.close()


def test_a_file_replaced_while_open_goes_on_being_the_old_one(
    checkpoint: Path, expected: list[mx.array], tmp_path: Path
) -> None:
    folder = tmp_path / "model.qpack"
    repack_checkpoint(checkpoint, folder)
    model: Any = load_streamed(folder, cache_gb=0.0001)[0]
    for path in (folder / "packed_experts").glob("*.bin"):
        (folder / "new").write_bytes(bytes(path.stat().st_size))
        os.replace(folder / "new", path)
    assert equal(decode(model), expected)
    model.pools.close()


def test_a_call_broken_off_while_it_reads_loses_no_slot(model: Any, expected: list[mx.array]) -> None:
    pools = model.pools
    begin, calls = pools.begin, []

    def interrupted(*given: Any) -> Any:
        begin(*given)
        calls.append(given)
        if len(calls) == 5:
            raise KeyboardInterrupt

    pools.begin = interrupted

    def layers() -> None:
        for layer in (0, 1, 2, 3, 0):
            pools.load(layer, [n % 8 for n in (len(calls), len(calls) + 3)])

    with pytest.raises(KeyboardInterrupt):
        layers()
    pools.begin = begin
    assert pools._open is not None
    assert equal(decode(model), expected)
    check_table(model)


@pytest.mark.parametrize("calls", range(1, 9))
def test_a_step_broken_off_while_it_asks_for_reads_waits_for_none_of_the_others(
    model: Any, expected: list[mx.array], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "SMALL_BYTES", 0)  # or some are read without being asked for
    threads, post, n = model.pools._threads, model.pools._threads.post, 0

    def broken_off(*given: Any) -> None:
        nonlocal n
        n += 1
        if n == calls:
            raise KeyboardInterrupt
        post(*given)

    monkeypatch.setattr(threads, "post", broken_off)
    with pytest.raises(KeyboardInterrupt):
        decode(model)
    assert equal(decode(model), expected)  # and does not hang
    check_table(model)


def test_a_layer_that_cannot_be_loaded_whole_fails_at_load(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(n: int, ask: Callable[..., int]) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    Disk(monkeypatch, fault)
    with pytest.raises(ReadFailed):
        load_streamed(checkpoint, cache_gb=1.0)


def test_a_closed_model_gives_its_files_back_and_refuses_to_go_on(model: Any) -> None:
    decode(model)
    proc = Path("/proc/self/fd")
    before = len(list(proc.iterdir())) if proc.is_dir() else 0
    model.pools.close()
    assert not before or len(list(proc.iterdir())) < before
    with pytest.raises(RuntimeError, match="closed"):
        decode(model)
    model.pools.close()  # twice is fine
