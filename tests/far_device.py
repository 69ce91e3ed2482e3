"""A device with memory of its own, played by the CPU: what CUDA's path does, except for the kernel itself.

The kernel's stand-in does on call what the real one does in stream order: it waits for what was launched, then moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import pytest

from swiftlet_mlx import cuda, pools


@contextmanager
def far_device() -> Iterator[list[list[int]]]:
    """Models loaded inside have their slots on such a device.

    Yields:
        The slots of each move, as they are launched.
    """
    moves: list[list[int]] = []

    def kernel(sizes: tuple[int, ...], unit: int) -> Callable[..., Any]:
        def move(inputs: list[mx.array], template: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> Any:
            staging, numbers, *sections = inputs
            mx.synchronize()
            count, *listed = cast("list[int]", numbers.tolist())
            assert 2 * count == len(listed)
            slots, rows = listed[:count], listed[count:]
            row_bytes = dict(template)["ROW"] * unit
            source = memoryview(staging)  # type: ignore[arg-type]
            for slot, row in zip(slots, rows, strict=True):
                at = row * row_bytes
                for section, end, size in zip(sections, accumulate(sizes), sizes, strict=True):
                    view = memoryview(section).cast("B")  # type: ignore[arg-type]
                    view[slot * size : (slot + 1) * size] = source[at + end - size : at + end]
            moves.append(slots)
            return [mx.array([count], output_dtypes[0])]

        return move

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_kernel", kernel)
        patch.setattr(pools, "backend", lambda: "cuda")
        yield moves
