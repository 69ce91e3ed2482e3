"""Run Mixture-of-Experts models larger than memory on MLX.

Public names are imported on first use, so that `import swiftlet_mlx.qpack` does not import mlx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import SwiftletError as SwiftletError
    from .load import load as load
    from .load import model_classes as model_classes

__version__ = "0.1.0"

_HOME = {
    "load": "load",
    "model_classes": "load",
    "SwiftletError": "errors",
}
__all__ = ["SwiftletError", "__version__", "load", "model_classes"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
