"""Rows in tiles against the stock layer that sorts them itself: the same bits, whatever the weights are."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from swiftlet_mlx import tiles
from swiftlet_mlx._compat import SwitchGLU, SwitchMLP
from swiftlet_mlx.routes import Routes

HIDDEN, INNER, EXPERTS = 64, 32, 5
WIDTHS: dict[str, dict[str, Any] | None] = {
    "none": None,
    **{f"{bits} bits": {"group_size": 32, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}


def layer(cls: Any, width: dict[str, Any] | None, bias: bool) -> Any:
    mx.random.seed(4)
    made = cls(HIDDEN, INNER, EXPERTS, bias=bias)
    for name, linear in list(made.children().items()):
        if hasattr(linear, "num_experts"):
            if bias:
                linear.bias = mx.random.normal(linear.bias.shape)
            made[name] = linear.to_quantized(**width) if width else linear
    mx.eval(made.parameters())
    return made


@pytest.mark.parametrize("height", [1, 3, 16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cls", [SwitchGLU, SwitchMLP])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_in_tiles_have_the_bits_of_the_stock_layer(width: str, cls: Any, bias: bool, height: int) -> None:
    module = layer(cls, WIDTHS[width], bias)
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(45)])
    x = mx.random.normal((45, HIDDEN), key=mx.random.key(2))
    want = module(x, mx.array(chosen))
    layout = Routes(chosen, EXPERTS).lay_out([3, 0, 4, 1, 2], height)
    slots = mx.array(np.array(layout.experts, np.uint32)[layout.tiles])
    rows = x[mx.array(layout.pairs // 2)]
    got = tiles.rows_in_tiles(type(module).__call__, module, rows, slots, height)
    assert got.shape == (layout.n_rows, HIDDEN)
    assert np.array_equal(np.array(got)[layout.places].reshape(want.shape), np.array(want))


def test_on_the_cpu_rows_are_spread_over_streams_of_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer(SwitchGLU, WIDTHS["4 bits"], False), mx.random.normal((200, HIDDEN))
    slots = mx.sort(mx.arange(200) % EXPERTS).astype(mx.uint32)
    mx.eval(x, slots)
    monkeypatch.setattr(tiles.os, "cpu_count", lambda: 1)
    want = np.array(tiles.rows_in_tiles(SwitchGLU.__call__, module, x, slots, 1))
    monkeypatch.setattr(tiles, "backend", lambda: "cpu")
    monkeypatch.setattr(tiles.os, "cpu_count", lambda: 64)
    used: list[list[mx.Stream]] = []
    found: list[Any] = []
    made = tiles._streams
    monkeypatch.setattr(tiles, "_streams", lambda most: (used.append(made(most)), used[-1])[1])

    def compute() -> None:
        found.append(np.array(tiles.rows_in_tiles(SwitchGLU.__call__, module, x, slots, 1)))

    compute()
    compute()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert all(np.array_equal(got, want) for got in found)
    assert [len(streams) for streams in used] == [200 // tiles.STREAM_ROWS] * 3
    assert used[0] == used[1], "a stream has a thread of its own: they are made once"
    assert used[0] != used[2]


@pytest.mark.parametrize("height", [1, 4])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_few_rows_and_a_layer_that_sorts_otherwise_are_right_too(height: int, count: int) -> None:
    module = layer(SwitchGLU, WIDTHS["4 bits"], False)
    slots, x = mx.sort(mx.arange(count) % EXPERTS), mx.random.normal((count * height, HIDDEN))
    want = module(x, mx.repeat(slots, height)[:, None])[:, 0]

    def otherwise(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        return self(x, indices)  # type: ignore[no-any-return]

    for stock in (SwitchGLU.__call__, otherwise):
        got = tiles.rows_in_tiles(stock, module, x, slots.astype(mx.uint32), height)
        assert np.array_equal(np.array(got), np.array(want))
    assert tiles.takes_tiles(SwitchGLU.__call__)
    assert not tiles.takes_tiles(otherwise)


def test_tiles_are_as_high_as_most_experts_can_fill_and_of_one_row_off_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiles.tile_height(100_000, 10) == 1 or tiles.backend() == "cuda"
    monkeypatch.setattr(tiles, "backend", lambda: "cuda")
    assert [tiles.tile_height(n, 10) for n in (10, 200, 201, 5000)] == [16, 16, 64, 64]
