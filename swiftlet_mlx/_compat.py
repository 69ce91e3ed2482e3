"""Every name of mlx-lm this project uses that is not its documented interface, in one place.

tests/test_compat.py holds a contract test for each, so that a new mlx-lm release fails there first and by name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

from mlx_lm.models import gated_delta
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.utils import _get_classes as get_model_classes
from mlx_lm.utils import infer_quant_config

# What `SwitchGLU` and `SwitchMLP` call to bring many rows into the experts' order, and their results back.
GATHER_SORT, SCATTER_UNSORT = "_gather_sort", "_scatter_unsort"

__all__ = [
    "GATHER_SORT",
    "SCATTER_UNSORT",
    "QuantizedSwitchLinear",
    "SwitchGLU",
    "SwitchLinear",
    "SwitchMLP",
    "gated_delta",
    "get_model_classes",
    "infer_quant_config",
    "rebound",
]


def rebound(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The same function, looking some of its global names up elsewhere. Its module is not changed."""
    f = cast("types.FunctionType", function)
    copy = types.FunctionType(f.__code__, {**f.__globals__, **names}, f.__name__, f.__defaults__, f.__closure__)
    copy.__kwdefaults__ = f.__kwdefaults__
    return copy
