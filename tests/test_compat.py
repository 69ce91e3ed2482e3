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
