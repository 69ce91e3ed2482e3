"""Which folder a model's name means. Looks on this machine only; never at the network.

Knows paths; opens no model. Order: a path, the bundled demo, the models folder, the hub cache. Invariant:
what is returned is whole as far as names and sizes tell; a model that lies here unfinished is reported, not
used.
"""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from .errors import ModelNotFound
from .library import SUFFIX, Found, cached, installed, matching, models_folder

DEMO = "demo"
PARTS = ("config.json", "manifest.json", "packed_experts")  # a folder with none of them is no model, nor a broken one


def find_model(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a container or checkpoint.

    Args:
        name: A path, `demo` for the bundled model, the name of an installed container, or `ORG/NAME` as on a
            hub.
        revision: Branch, tag or commit of a hub model; None takes what is installed, or `main` of the cache.

    Raises:
        ModelNotFound: naming what was looked for and the command that installs a model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / name).exists() for name in PARTS):
            raise ModelNotFound(
                f"{path.resolve()} is no model: it has no config.json. `swiftlet-mlx list` shows what is here"
            )
        return path
    if str(name) == DEMO:
        demo = demo_folder()
        if demo.is_dir():
            return demo
    if path.exists():
        raise ModelNotFound(f"{path} is a file; a model is a folder (NAME.qpack or an MLX checkpoint)")
    return _by_name(str(name), revision)


def demo_folder() -> Path:
    """Where the bundled demo model lies."""
    return Path(str(resources.files("swiftlet_mlx"))) / "demo" / "demo.qpack"


def _by_name(name: str, revision: str | None) -> Path:
    found = matching(name, revision)
    whole = [f for f in found if not f.fault]
    if whole:
        rivals = [f for f in whole if f.kind == "container" and f.name != name and f.path.parent == models_folder()]
        if whole[0] in rivals and len(rivals) > 1:
            names = ", ".join(f.name for f in rivals)
            raise ModelNotFound(f"{name}: several containers were made from it; say which: {names}")
        return whole[0].path
    if found:
        raise ModelNotFound(f"{name} is at {found[0].path} but cannot be used: {_mend(found[0])}")
    near = _near(name)
    hint = f" Did you mean {near}?" if near else ""
    if name.startswith(("/", "~", "./", "../")):
        raise ModelNotFound(f"there is no folder {name}.{hint} `swiftlet-mlx list` shows what is here")
    repo = name if name.count("/") == 1 else "ORG/NAME"
    raise ModelNotFound(
        f"no model {name!r} on this machine.{hint} `swiftlet-mlx list` shows what is here; to install one: "
        f"`swiftlet-mlx repack --from-hf {repo}`"
    )


def _mend(found: Found) -> str:
    if found.kind == "unfinished":
        return "its installation was not finished; repeat the command that began it, it continues where it stopped"
    if found.kind == "checkpoint":
        return (
            f"its download is incomplete ({found.fault}). `hf download {found.name}` fetches the rest, or "
            f"make a container without it: `swiftlet-mlx repack --from-hf {found.name} --output "
            f"{found.name.split('/')[-1]}{SUFFIX}`"
        )
    return found.fault


def _near(name: str) -> str:
    names = {f.name: f.name for f in [*installed(), *cached()]}
    names.update({n.split("/")[-1]: n for n in list(names)})
    close = difflib.get_close_matches(name.split("/")[-1], names, n=1, cutoff=0.75)
    return names[close[0]] if close else ""
