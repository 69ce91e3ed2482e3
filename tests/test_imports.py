"""Imports point down, heavy and foreign packages stay where they belong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "swiftlet_mlx": ROOT / "swiftlet_mlx",
    "swiftlet_repack": ROOT / "repack" / "swiftlet_repack",
    "swiftlet_bench": ROOT / "bench" / "swiftlet_bench",
}
BYTES_ONLY = (
    "errors", "units", "stats", "safetensors", "jsonfile", "config", "layout", "qpack", "checkpoint", "reader",
    "policy", "locate",
)  # fmt: skip


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            yield ".".join(parts).removesuffix(".__init__"), path


MODULES = dict(modules())


@cache  # parsed when asked for: every worker collects this file
def imports(name: str) -> set[str]:
    """Absolute names a module imports, wherever in the file; `from . import x` gives the module x."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            found |= {target, *(f"{target}.{alias.name}" for alias in node.names)}
    return found


def every() -> Iterator[tuple[str, set[str]]]:
    return ((name, imports(name)) for name in MODULES)


def test_modules_form_no_cycle() -> None:
    graph = {name: {i for i in found if i in MODULES and i != name} for name, found in every()}
    # a package's __init__ hands names on lazily; it is above everything it names
    graph = {name: {i for i in found if i not in PACKAGES} for name, found in graph.items()}
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_imports_upwards(name: str) -> None:
    top = name.split(".")[0]
    inner = name.split(".")[1] if "." in name else ""
    for found in imports(name):
        if top == "swiftlet_mlx" and inner not in ("cli", "server", "__main__"):
            assert not found.startswith(("swiftlet_mlx.cli", "swiftlet_mlx.server")), found
            assert not found.startswith(("swiftlet_repack", "swiftlet_bench")), found
            assert found.split(".")[0] not in ("typer", "rich", "starlette", "uvicorn", "pydantic"), found
        if top == "swiftlet_repack":
            assert found.split(".")[0] not in ("mlx", "mlx_lm", "swiftlet_bench"), found
        if inner == "server":
            assert not found.startswith(("typer", "rich")), found
        if inner == "cli":
            assert not found.startswith(("starlette", "pydantic")), found
    assert not (name == "swiftlet_mlx.reader" and "swiftlet_mlx.policy" in imports(name))
    assert not (name == "swiftlet_mlx.policy" and any(i.startswith("swiftlet") for i in imports(name)))


def test_the_page_that_says_where_things_are_has_every_module_above_what_it_imports() -> None:
    page = (ROOT / "swiftlet_mlx" / "README.md").read_text().splitlines()
    rows = [re.findall(r"`(\w+)`", line) for line in page if line.startswith("|")]
    place = {name: n for n, row in enumerate(rows) for name in row}
    assert sorted(name for row in rows for name in row) == sorted(
        p.stem for p in (ROOT / "swiftlet_mlx").iterdir() if p.stem in ("cli", "server") or p.suffix == ".py"
        if not p.stem.startswith("__")
    )  # fmt: skip
    for name, found in every():
        if name.startswith("swiftlet_mlx.") and "__" not in name:
            for other in {i.split(".")[1] for i in found if i.startswith("swiftlet_mlx.")} & place.keys():
                assert place[name.split(".")[1]] <= place[other], f"{name} imports {other}, which stands above it"


def test_private_mlx_lm_names_are_only_in_compat() -> None:
    for name, found in every():
        private = [i for i in found if i.startswith("mlx_lm") and any(p.startswith("_") for p in i.split("."))]
        assert not private or name == "swiftlet_mlx._compat", (name, private)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_library_is_silent_and_reads_no_environment(name: str) -> None:
    inner = name.split(".")[1] if "." in name else ""
    outside = name.startswith(("swiftlet_bench", "swiftlet_repack.cli")) or inner in ("cli", "server", "__main__")
    if outside:
        return
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "input"), f"{name}:{node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "getenv", "putenv"), f"{name}:{node.lineno}"


def test_containers_are_read_without_mlx() -> None:
    lines = [f"import swiftlet_mlx.{name}" for name in BYTES_ONLY]
    program = "; ".join(["import sys", *lines, "assert not {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)"])
    subprocess.run([sys.executable, "-c", program], check=True)
