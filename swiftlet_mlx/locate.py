"""Which folder a model's name means. Looks on this machine only; never at the network.

Knows paths; opens no model. Order: a path, the bundled demo.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from .errors import ModelNotFound

DEMO = "demo"


def find_model(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a container or checkpoint.

    Args:
        name: A path, or `demo` for the bundled model.
        revision: Revision of a hub model.

    Raises:
        ModelNotFound: naming what was looked for and the command that installs a model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if str(name) == DEMO:
        demo = Path(str(resources.files("swiftlet_mlx"))) / "demo" / "demo.qpack"
        if demo.is_dir():
            return demo
    if path.exists():
        raise ModelNotFound(f"{path} is a file; a model is a folder (NAME.qpack or an MLX checkpoint)")
    raise ModelNotFound(
        f"no model folder {name!s} here. Install one with "
        f"`swiftlet-mlx repack --from-hf ORG/NAME --output NAME.qpack`, or give the path of an MLX checkpoint"
    )
