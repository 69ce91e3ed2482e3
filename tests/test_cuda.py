"""Slots in a device's own memory: what is read gets there, whole, before it is used; on CUDA only.

The CPU plays the device (far_device.py). The kernel itself runs on CUDA alone; there these checks were made by hand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from far_device import far_device
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tiny import make_checkpoint

from swiftlet_mlx import cuda, pools
from swiftlet_mlx.errors import ReadFailed
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.memory import GB
from swiftlet_mlx.moe import Streamed
from swiftlet_mlx.prefill import prefill

TOKENS = [1, 5, 9, 42, 7, 99, 3, 17, 64, 2, 88, 51]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("far") / "model",
        kind="qwen3_next", bits=4, dtype=mx.float32, shape={"layers": 3, "hidden": 64}, full_attention_interval=3,
    )  # fmt: skip


@pytest.fixture
def moves() -> Iterator[list[list[int]]]:
    with far_device() as moves:
        yield moves


def load(folder: Path, slots: int) -> Any:
    model: Any = load_streamed(folder, cache_gb=1.0, threads=2)[0]
    size = sum(slots * pool.table.payload_bytes for pool in model.pools.layers.values())
    model.pools.resize(size)
    assert {pool.n_slots for pool in model.pools.layers.values()} == {slots}
    return model


def logits(model: Any, tokens: list[int], alone: bool = False) -> list[np.ndarray]:
    cache, out = make_prompt_cache(model), []
    if hasattr(model, "pools"):
        model.pools.alone = alone
    for token in tokens:
        out.append(np.array(model(mx.array([[token]]), cache=cache)[0, -1]))
    return out


@pytest.fixture(scope="module")
def stock(folder: Path) -> list[np.ndarray]:
    return logits(load_model(folder)[0], TOKENS)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("slots", [2, 3, 7, 8])
def test_decode_equals_stock(
    folder: Path, stock: list[np.ndarray], moves: list[list[int]], slots: int, alone: bool
) -> None:
    model = load(folder, slots)
    for got, want in zip(logits(model, TOKENS, alone), stock, strict=True):
        assert np.array_equal(got, want)
    assert sum(map(len, moves)) >= model.pools.stats.misses > 0 or slots == 8
    model.pools.close()


def test_a_prompt_equals_stock_and_leaves_slots_that_tell_the_truth(folder: Path, moves: list[list[int]]) -> None:
    prompt = (TOKENS * 4)[:40]
    plain, model = load_model(folder)[0], load(folder, 3)
    cache, own = make_prompt_cache(plain), make_prompt_cache(model)
    want = np.array(plain(mx.array([prompt]), cache=cache)[0, -1])
    prefill(model, prompt[:-1], own)
    assert np.array_equal(np.array(model(mx.array([prompt[-1:]]), cache=own)[0, -1]), want)
    for token in TOKENS:
        want = np.array(plain(mx.array([[token]]), cache=cache)[0, -1])
        assert np.array_equal(np.array(model(mx.array([[token]]), cache=own)[0, -1]), want)
    model.pools.close()


def test_a_batch_equals_stock(folder: Path, moves: list[list[int]]) -> None:
    plain, model = load_model(folder)[0], load(folder, 8)
    rows = mx.array([[t] for t in TOKENS[:6]])
    assert np.array_equal(np.array(model(rows)), np.array(plain(rows)))
    model.pools.resize(sum(2 * pool.table.payload_bytes for pool in model.pools.layers.values()))
    assert np.array_equal(np.array(model(rows)), np.array(plain(rows)))
    model.pools.close()


def test_what_failed_to_be_read_is_not_moved(
    folder: Path, stock: list[np.ndarray], moves: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, 3)
    source, calls = model.pools.source, 0
    read = source.read

    def fails(layer: int, first: int, rows: Any) -> int:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            for row in rows:
                for view in row:
                    view[:] = b"\xff" * len(view)
            raise ReadFailed("a bad block")
        return int(read(layer, first, rows))

    monkeypatch.setattr(source, "read", fails)
    for _ in range(6):
        with pytest.raises(ReadFailed):
            logits(model, TOKENS)
    monkeypatch.setattr(source, "read", read)
    for got, want in zip(logits(model, TOKENS), stock, strict=True):
        assert np.array_equal(got, want)
    model.pools.close()


def test_a_tokens_experts_are_computed_together_however_long_reads_take(
    folder: Path, stock: list[np.ndarray], moves: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "LONG_SECONDS", -1.0)
    model = load(folder, 3)
    monkeypatch.setattr(Streamed, "_joined", None)
    for got, want in zip(logits(model, TOKENS), stock, strict=True):
        assert np.array_equal(got, want)
    assert model.pools.stats.misses > 0
    model.pools.close()


def test_whole_layers_are_read_one_after_the_other_and_never_again(
    folder: Path, stock: list[np.ndarray], moves: list[list[int]]
) -> None:
    model: Any = load_streamed(folder, cache_gb=1.0)[0]
    reads = model.pools.stats.reads
    assert all(pool.complete for pool in model.pools.layers.values())
    for got, want in zip(logits(model, TOKENS), stock, strict=True):
        assert np.array_equal(got, want)
    assert model.pools.stats.reads == reads
    assert model.pools.stats.read_backs == 0
    model.pools.close()


def test_staging_is_as_large_as_the_largest_layer(folder: Path, moves: list[list[int]]) -> None:
    model = load(folder, 3)
    (pool, *_) = model.pools.layers.values()
    before = mx.get_active_memory()
    pool.staging.reserve(pool.table.payload_bytes, 3)
    assert mx.get_active_memory() == before
    assert all(len(view) == s.size for view, s in zip(pool.rows(2), pool.table.sections, strict=True))
    assert model.pools.nbytes / GB < 1
    model.pools.close()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    slots=st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True),
)
@settings(max_examples=50, deadline=None)
def test_a_move_changes_the_slots_it_names_and_no_others(sizes: list[int], slots: list[int]) -> None:
    with far_device():
        staging = cuda.Staging()
        staging.reserve(sum(sizes), 7)
        arrays = [mx.full((7, size), 7, mx.uint8) for size in sizes]
        mx.eval(*arrays)
        mover = staging.mover(sizes, arrays)
        for slot in slots:
            for n, row in enumerate(mover.rows(slot)):
                row[:] = bytes([(100 + 10 * slot + n) % 256]) * len(row)
        mover.move(slots)
        for n, array in enumerate(arrays):
            got = np.array(array)
            for slot in range(7):
                assert set(got[slot].tolist()) == {(100 + 10 * slot + n) % 256 if slot in slots else 7}


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_numbers_come_back_from_words_as_they_went_in(data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from([1, 2, 3, 128, 256, 257, 512, 1 << 16, 1 << 31]))
    numbers = data.draw(st.lists(st.integers(0, limit - 1), min_size=1, max_size=32))
    if cuda.fits_words(len(numbers), limit):
        words = cuda.pack(mx.array(numbers, mx.uint32).reshape(1, 1, -1), limit)
        assert all(word.nbytes == 8 for word in words)
        assert len(words) <= 4
        assert cuda.unpack(words, len(numbers), limit) == numbers


def test_lists_of_numbers_do_not_disturb_each_other() -> None:
    staging = cuda.Staging()
    lists = [[n, n + 1, n * n] for n in range(60)]
    arrays = [staging.numbers(values) for values in lists]
    assert [a.tolist() for a in arrays] == lists


def test_the_driver_is_advised_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given_: list[Any] = []
    monkeypatch.setattr(cuda, "_advise", lambda: lambda *a: given_.append(a))
    cuda.Staging().reserve(64, 2)
    assert given_ == []
    monkeypatch.setattr(cuda, "backend", lambda: "cuda")
    staging = cuda.Staging()
    staging.reserve(64, 2)
    places = {ctypes.addressof(ctypes.c_char.from_buffer(staging.row(0)))}
    assert places < {address for address, *_ in given_}
    assert {(what, at.type) for *_, what, at in given_} == {(3, 2), (5, 1)}  # stay on the host, mapped on the device


def test_a_driver_without_the_function_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(cuda, "backend", lambda: "cuda")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda._advise.cache_clear()
    staging = cuda.Staging()
    staging.reserve(64, 2)
    staging.row(1)[:] = bytes(64)
    cuda._advise.cache_clear()
