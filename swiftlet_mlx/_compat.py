"""Every name of mlx-lm this project uses that is not its documented interface, in one place.

tests/test_compat.py holds a contract test for each, so that a new mlx-lm release fails there first and by name.
"""

from __future__ import annotations

from mlx_lm.models import gated_delta
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.utils import _get_classes as get_model_classes
from mlx_lm.utils import infer_quant_config

__all__ = [
    "QuantizedSwitchLinear",
    "SwitchGLU",
    "SwitchLinear",
    "SwitchMLP",
    "gated_delta",
    "get_model_classes",
    "infer_quant_config",
]
