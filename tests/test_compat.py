"""A contract for each name of mlx-lm that is not its documented interface: a new release fails here first."""

from __future__ import annotations

import inspect

import mlx.core as mx
import mlx.nn as nn

from swiftlet_mlx import _compat


def test_switch_layers_are_called_with_tokens_and_indices() -> None:
    for cls in (_compat.SwitchGLU, _compat.SwitchMLP):
        assert list(inspect.signature(cls.__call__).parameters) == ["self", "x", "indices"]


def test_switch_layers_hold_projections_by_the_names_that_containers_use() -> None:
    names = {name for name, child in _compat.SwitchGLU(8, 8, 2).children().items() if child}
    assert {"gate_proj", "up_proj", "down_proj"} <= names
    assert {"fc1", "fc2"} <= {name for name, child in _compat.SwitchMLP(8, 8, 2).children().items() if child}


def test_switch_linear_takes_sorted_indices_and_keeps_its_weight_under_weight() -> None:
    linear = _compat.SwitchLinear(8, 4, 3, bias=False)
    assert linear.weight.shape == (3, 4, 8)
    parameters = inspect.signature(type(linear).__call__).parameters
    assert list(parameters) == ["self", "x", "indices", "sorted_indices"]


def test_quantized_switch_linear_reads_these_attributes_when_called() -> None:
    linear = _compat.QuantizedSwitchLinear(32, 4, 3, bias=False, group_size=32, bits=4, mode="affine")
    assert (linear.group_size, linear.bits, linear.mode, linear.global_scale) == (32, 4, "affine", None)
    assert linear.weight.shape == (3, 4, 4)
    assert linear.scales.shape == linear.biases.shape == (3, 4, 1)


def test_switch_layers_sort_many_rows_by_two_functions_of_their_module() -> None:
    for cls in (_compat.SwitchGLU, _compat.SwitchMLP):
        module = inspect.getmodule(cls)
        sort, unsort = (getattr(module, name) for name in (_compat.GATHER_SORT, _compat.SCATTER_UNSORT))
        assert {sort.__name__, unsort.__name__} <= set(cls.__call__.__code__.co_names)
        x, indices = mx.arange(6.0).reshape(3, 1, 1, 2), mx.array([[2, 0], [1, 2], [0, 1]])
        rows, experts, order = sort(x, indices)
        assert (rows.shape, experts.tolist()) == ((6, 1, 2), [0, 0, 1, 1, 2, 2])
        back = unsort(rows, order, indices.shape)
        assert mx.array_equal(back[:, 0, 0], x[:, 0, 0])
        assert list(inspect.signature(unsort).parameters) == ["x", "inv_order", "shape"]


def test_a_rebound_function_looks_names_up_elsewhere_and_the_module_keeps_its_own() -> None:
    seen: list[tuple[int, ...]] = []

    def sort(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        seen.append(x.shape)
        return inspect.getmodule(_compat.SwitchGLU)._gather_sort(x, indices)  # type: ignore[union-attr]

    glu = _compat.SwitchGLU(8, 8, 2)
    x, indices = mx.ones((40, 8)), mx.zeros((40, 2), mx.uint32)
    rebound = _compat.rebound(_compat.SwitchGLU.__call__, **{_compat.GATHER_SORT: sort})
    assert mx.array_equal(rebound(glu, x, indices), glu(x, indices))
    assert seen == [(40, 1, 1, 8)]


def test_infer_quant_config_needs_only_shapes_and_dtypes() -> None:
    module = _compat.SwitchLinear(64, 4, 3, bias=False)
    weights = {"p.weight": mx.zeros((9, 4, 12), mx.uint32), "p.scales": mx.zeros((9, 4, 2))}
    assert _compat.infer_quant_config("p", module, weights) == {"group_size": 32, "bits": 6, "mode": "affine"}
    weights = {"p.weight": mx.zeros((9, 4, 8), mx.uint32), "p.scales": mx.zeros((9, 4, 4), mx.uint8)}
    assert _compat.infer_quant_config("p", module, weights) == {"group_size": 16, "bits": 4, "mode": "nvfp4"}


def test_model_classes_come_from_the_model_type() -> None:
    model, args = _compat.get_model_classes({"model_type": "qwen3_next"})
    assert issubclass(model, nn.Module)
    assert hasattr(args, "from_dict")
