"""The models that are on this machine: containers in the models folder, MoE checkpoints in the hub cache.

Looks at names, sizes and small JSON files; opens no tensor and never asks the network. Invariant: a `Found`
without a fault can be given to the loader as it is; one with a fault says what is missing and is never loaded
by name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .checkpoint import shard_files
from .config import ModelConfig, read_config
from .errors import ContainerError, ModelNotFound, SwiftletError
from .jsonfile import object_if_there
from .qpack import MANIFEST, is_container, open_container

Kind = Literal["container", "checkpoint", "unfinished"]
ORIGIN = "source.json"  # written by the installer: source, commit, and the hashes that were checked
SUFFIX, PARTIAL = ".qpack", ".partial"
_CACHED = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>.+)")


@dataclass(frozen=True, slots=True)
class Found:
    """One model: `name` is what a command accepts, `source` what it was made from, `fault` why it cannot be
    used."""

    name: str
    path: Path
    kind: Kind
    source: str = ""
    revision: str = ""
    fault: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its files, links followed; of an unfinished one, what is on the disk so far."""
        stats = [file.stat() for file in self.path.rglob("*") if file.is_file()]
        if self.kind == "unfinished":
            return sum(min(stat.st_size, stat.st_blocks * 512) for stat in stats)
        return sum(stat.st_size for stat in stats)


def models_folder() -> Path:
    """Where containers are installed when no other place is named."""
    return Path.home() / ".swiftlet" / "models"


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloaded (HF_HOME and HF_HUB_CACHE as it reads them)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def installed(folder: Path | None = None) -> list[Found]:
    """Containers in the models folder, whole and unfinished ones, by name."""
    root = folder or models_folder()
    if not root.is_dir():
        return []
    return [found for path in sorted(root.iterdir()) if path.is_dir() and (found := _installed(path))]


def cached(folder: Path | None = None) -> list[Found]:
    """MoE checkpoints and containers in the hub cache, one for each ref or snapshot, by name."""
    root = folder or hub_cache()
    if not root.is_dir():
        return []
    found: list[Found] = []
    for path in sorted(root.iterdir()):
        match = _CACHED.fullmatch(path.name)
        if match and (path / "snapshots").is_dir():
            found += _snapshots(path, f"{match['org']}/{match['name']}")
    return found


def matching(name: str, revision: str | None = None) -> list[Found]:
    """Everything here that goes by a name, best first: the models folder before the cache, exact before
    letter case.

    Args:
        name: `ORG/NAME` as on a hub, or the name of a folder in the models folder, with or without `.qpack`.
        revision: branch, tag or commit; None is any in the models folder and `main` in the cache.
    """
    wanted = name.removesuffix(SUFFIX).casefold()
    here = [f for f in installed() if wanted in (_plain(f.name), f.source.casefold())]
    if revision is not None:
        here = [f for f in here if revision == f.revision]
    cache = [f for f in cached() if f.name.casefold() == wanted]
    refs = [f for f in cache if revision in (f.revision, f.path.name)] if revision else _preferred(cache)
    return sorted(here + refs, key=lambda f: (bool(f.fault), f.name != name and f.source != name))


def one(name: str) -> Found:
    """The one model that a name or a path means, whole or not.

    Raises:
        ModelNotFound: if there is none, or more than one.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (found := _installed(path.resolve())):
        return found
    every = matching(name)
    if len(every) == 1:
        return every[0]
    if every:
        places = ", ".join(str(found.path) for found in every)
        raise ModelNotFound(f"{name} is here more than once: {places}. Give the path of the one you mean")
    raise ModelNotFound(f"no model {name!r} on this machine; `swiftlet-mlx list` shows what is here")


def delete(found: Found) -> int:
    """Delete a model's files; returns the bytes that were freed.

    Raises:
        ModelNotFound: if the system refuses, with its reason.
    """
    freed = found.nbytes
    try:
        if hub_cache() in found.path.parents:
            from huggingface_hub import scan_cache_dir

            scan = scan_cache_dir(hub_cache())
            repo = frozenset(r for r in scan.repos if r.repo_path == found.path.parent.parent)
            strategy = replace(scan, repos=repo).delete_revisions(found.path.name)  # a copy may share the commit id
            freed = strategy.expected_freed_size
            strategy.execute()
        else:
            (found.path / MANIFEST).unlink(missing_ok=True)  # from here on it is no container, whatever happens
            shutil.rmtree(found.path)
    except OSError as error:
        raise ModelNotFound(f"{found.path}: cannot be deleted ({error.strerror or error})") from None
    return freed


def _plain(name: str) -> str:
    return name.removesuffix(PARTIAL).removesuffix(SUFFIX).casefold()


def _installed(path: Path) -> Found | None:
    if path.name.endswith(PARTIAL):
        return Found(path.name.removesuffix(PARTIAL).removesuffix(SUFFIX), path, "unfinished", fault="unfinished")
    if not is_container(path):
        return None
    source, revision = _origin(path)
    name = path.name.removesuffix(SUFFIX)
    return Found(name, path, "container", source, revision, _fault(open_container, path))


def _origin(path: Path) -> tuple[str, str]:
    """What a container was made from, and which commit: as its installer noted it, or as its manifest
    says."""
    for file, source, revision in ((ORIGIN, "source", "revision"), (MANIFEST, "sourceCheckpoint", "")):
        try:
            noted = object_if_there(path / file, ContainerError)
        except ContainerError:
            continue
        if noted is not None and source in noted:
            return str(noted[source]), str(noted.get(revision) or "")
    return "", ""


def _snapshots(path: Path, name: str) -> Iterator[Found]:
    refs = {ref.read_text().strip(): ref for ref in sorted((path / "refs").rglob("*")) if ref.is_file()}
    for snapshot in sorted((path / "snapshots").iterdir()):
        ref = refs.get(snapshot.name)
        label = ref.relative_to(path / "refs").as_posix() if ref else snapshot.name
        if is_container(snapshot):
            yield Found(name, snapshot, "container", name, label, _fault(open_container, snapshot))
        elif _is_moe(snapshot):
            yield Found(name, snapshot, "checkpoint", name, label, _fault(shard_files, snapshot))


def _fault(check: Callable[[Path], object], folder: Path) -> str:
    try:
        check(folder)
    except SwiftletError as error:
        return str(error)
    return ""


def _is_moe(folder: Path) -> bool:
    try:
        config = read_config(folder)
        return ModelConfig.from_dict(config, str(folder)).expert_count > 0
    except SwiftletError:
        return False


def _preferred(cache: list[Found]) -> list[Found]:
    """`main` if it is there, else the only snapshot; several without a main are told apart by --revision."""
    main = [f for f in cache if f.revision == "main"]
    return main or (cache if len(cache) == 1 else [])
