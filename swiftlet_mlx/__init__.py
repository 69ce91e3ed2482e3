"""Run Mixture-of-Experts models larger than memory on MLX.

Public names are imported on first use, so that `import swiftlet_mlx.qpack` does not import mlx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .completion import Ask as Ask
    from .completion import Completions as Completions
    from .engine import Engine as Engine
    from .errors import SwiftletError as SwiftletError
    from .loader import load as load
    from .loader import model_classes as model_classes
    from .sampling import Sampling as Sampling
    from .session import Session as Session
    from .turn import Turn as Turn

__version__ = "0.1.0"

_HOME = {
    "load": "loader",  # a module called `load` would take the function's place once imported
    "model_classes": "loader",
    "SwiftletError": "errors",
    "Ask": "completion",
    "Completions": "completion",
    "Engine": "engine",
    "Sampling": "sampling",
    "Session": "session",
    "Turn": "turn",
}
__all__ = [
    "Ask",
    "Completions",
    "Engine",
    "Sampling",
    "Session",
    "SwiftletError",
    "Turn",
    "__version__",
    "load",
    "model_classes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
