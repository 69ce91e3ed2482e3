"""A stand-in for what routed experts will return, so that a layer can run before its experts have been read.

A layer of mlx-lm calls its experts, weighs and adds what they return, and adds the residual. `Promise` is
an array that remembers those steps instead of doing them. When the experts have been computed the steps are
replayed on the
real array: the same operations in the same order, hence the same bits.

Knows arithmetic, nothing of experts, files or layers. Invariant: a promise is never evaluated. Its own
content is a lazy NaN of the right shape and dtype; an operation that is not remembered turns it into an
ordinary array, which the caller sees by its type (`isinstance(out, Promise)`) and takes as "this layer does
something unforeseen".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Step:
    """One remembered operation: a method of the array, its arguments, and the dtype it gives."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: mx.Dtype

    @property
    def operands(self) -> list[mx.array]:
        """The arrays among the arguments."""
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, mx.array)]


class Promise(mx.array):
    """An array yet to come, and what will be done with it.

    Args:
        like: a lazy array of the shape and dtype the experts will return.
        steps: what has been asked of it so far.
    """

    def __init__(self, like: mx.array, steps: tuple[Step, ...] = ()) -> None:
        super().__init__(like)
        self.steps = steps

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: mx.Dtype) -> Promise:
        """A promise of an array of this shape and dtype."""
        return cls(mx.broadcast_to(mx.array(float("nan"), dtype=dtype), shape))

    def _then(self, method: str, *args: Any, **kwargs: Any) -> mx.array:
        like: mx.array = getattr(mx.array, method)(self, *args, **kwargs)
        if any(isinstance(a, Promise) for a in args):
            return like  # two promises in one expression: not something to replay
        return Promise(like, (*self.steps, Step(method, args, kwargs, like.dtype)))

    def __mul__(self, other: Any) -> mx.array:
        return self._then("__mul__", other)

    def __rmul__(self, other: Any) -> mx.array:
        return self._then("__rmul__", other)

    def __add__(self, other: Any) -> mx.array:
        return self._then("__add__", other)

    def __radd__(self, other: Any) -> mx.array:
        # Python asks the right operand first when its class derives from the left one's: `array + promise`
        # comes here.
        return self._then("__radd__", other)

    def __imul__(self, other: Any) -> mx.array:
        return self._then("__mul__", other)

    def __iadd__(self, other: Any) -> mx.array:
        return self._then("__add__", other)

    def sum(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._then("sum", *args, **kwargs)

    def astype(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._then("astype", *args, **kwargs)

    def reshape(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._then("reshape", *args, **kwargs)

    @property
    def weights(self) -> mx.array | None:
        """`[..., k, 1]` if the first two steps are the weighted sum over k, which can then be taken in parts."""
        if len(self.steps) < 2:
            return None
        times, total = self.steps[:2]
        if times.method not in ("__mul__", "__rmul__") or total.method != "sum" or not times.operands:
            return None
        if (*total.args, *total.kwargs.values()) != (-2,):
            return None
        w = times.operands[0]
        return w if w.ndim >= 2 and w.shape[-1] == 1 else None

    def kept(self, y: mx.array) -> mx.array:
        """Do all steps to what the experts returned, `[..., k, H]`."""
        return _replay(y, self.steps)

    def kept_from_sum(self, total: mx.array) -> mx.array:
        """Do the steps after the weighted sum to `total`, `[..., H]`, that sum taken elsewhere."""
        return _replay(total.astype(self.steps[1].dtype), self.steps[2:])

    @property
    def operands(self) -> list[mx.array]:
        """Every array that the steps still need. Evaluate them to let go of the graphs behind them."""
        return [a for step in self.steps for a in step.operands]


def _replay(y: mx.array, steps: tuple[Step, ...]) -> mx.array:
    for step in steps:
        y = getattr(y, step.method)(*step.args, **step.kwargs)
    return y
