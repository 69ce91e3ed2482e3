"""Routes on disk: which experts each layer of each decode step used, one line a layer call.

Knows lines of text; no arrays. The first line is JSON and says what was recorded, every other one is
`layer expert expert ...`. Invariant: a file that was cut off is readable up to its last whole line.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from .errors import FormatError

MAGIC = "swiftlet-mlx routes 1"


@dataclass(frozen=True, slots=True)
class RouteInfo:
    """What was recorded. `experts` and `expert_bytes` are a layer's."""

    model: str
    layers: tuple[int, ...]
    experts: int
    top_k: int
    expert_bytes: int


class RouteFile:
    """A file being written; call it with (layer, experts). To be used as a context manager.

    `model.pools.recorder = file` records a model's decode steps.
    """

    def __init__(self, path: Path, info: RouteInfo) -> None:
        self._file: IO[str] = path.open("w", encoding="ascii")
        self._file.write(json.dumps({"format": MAGIC, **asdict(info)}) + "\n")

    def __call__(self, layer: int, experts: list[int]) -> None:
        self._file.write(f"{layer} {' '.join(map(str, experts))}\n")

    def __enter__(self) -> RouteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_routes(path: Path) -> tuple[RouteInfo, list[tuple[int, list[int]]]]:
    """A recorded file's info, and its (layer, experts) in the order they came.

    Raises:
        FormatError: the file holds no routes, or a line that is none.
    """
    first, *lines = path.read_text("ascii", errors="replace").splitlines(keepends=True) or [""]
    try:
        head = json.loads(first)
        if head.pop("format") != MAGIC:
            raise ValueError("another format")
        info = RouteInfo(**{**head, "layers": tuple(head["layers"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: no recorded routes ({error}); make some with `generate --record-routes`") from None
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # cut off while it was written
    routes = []
    for n, line in enumerate(lines, start=2):
        try:
            layer, *experts = map(int, line.split())
        except ValueError:
            raise FormatError(f"{path}: line {n} is not `layer expert expert ...`") from None
        routes.append((layer, experts))
    return info, routes
