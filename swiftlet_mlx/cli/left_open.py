"""What a command takes where its user has left something open: the demo's cache, and the page cache or not.

One place, so that `info` says what `chat`, `generate`, `serve` and `bench` do. Knows paths and remembered settings;
opens no model. Invariant: what the user has given stays as given.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import remembered

if TYPE_CHECKING:
    from swiftlet_mlx.reader import IO

DEMO_CACHE_GB = 0.003  # half of its experts: it would fit whole anywhere, but it is there to show streaming
AUTO = "auto"


def cache_gb_for(folder: Path, given: float | None) -> float | None:
    """The slot pool in GB, None where the machine is to be asked."""
    from swiftlet_mlx.locate import demo_folder

    return DEMO_CACHE_GB if given is None and folder == demo_folder() else given


def io_for(given: str) -> IO:
    """`cached` or `direct`; of `auto`, what `doctor` has found to be better here, and `cached` if it was not asked.

    Raises:
        OptionError: it is none of the three.
    """
    from swiftlet_mlx.errors import OptionError

    if given == "cached":
        return "cached"
    if given == "direct":
        return "direct"
    if given != AUTO:
        raise OptionError(f"--io {given}: it can be cached, direct or auto")
    found = remembered.reads()
    return found.io if found else "cached"


def io_in_words() -> str:
    """The choice of `auto` and where it comes from."""
    found = remembered.reads()
    if found is None:
        return "cached (page cache used; `swiftlet-mlx doctor` measures whether that is best here)"
    return f"{found.io} (measured by doctor: reads past the page cache are {found.direct_times:.2f} times as fast)"
