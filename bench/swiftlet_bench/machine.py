"""What a measurement was made on: chip, memory, system, backend, versions, commit. Nothing that names a person.

Knows the operating system's counters; no models. Invariant: no host name, user name or path is in what it returns.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from swiftlet_mlx.device import backend

PACKAGES = ("swiftlet-mlx", "mlx", "mlx-lm", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """A computer as a reader of results needs to know it."""

    chip: str
    cores: int
    memory_bytes: int
    system: str
    backend: str
    device: str

    @property
    def slug(self) -> str:
        """A name for files: `apple-m4-max-64gb-metal`."""
        parts = f"{self.chip} {round(self.memory_bytes / 2**30)}gb {self.backend}"
        if self.backend == "cuda":
            parts = f"{self.device} {self.backend}"
        return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", parts.lower())).strip("-")

    def __str__(self) -> str:
        gib = f"{self.memory_bytes / 2**30:.0f} GiB"
        return f"{self.chip}, {self.cores} cores, {gib}, {self.system}, {self.backend} ({self.device})"


@cache
def machine() -> Machine:
    """This computer."""
    return Machine(
        chip=_chip(),
        cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        system=_system(),
        backend=backend(),
        device=device_name(),
    )


def memory_bytes() -> int:
    """Physical memory, or a control group's limit where that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def device_name() -> str:
    """What MLX calls the device it computes on."""
    if backend() == "cpu":
        return "cpu"
    info = mx.device_info()
    return str(info.get("device_name", "gpu"))


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return {**found, "python": platform.python_version()}


@cache
def commit() -> str:
    """The commit of this checkout, with a plus if files have been changed; "release" outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "release"
    found = said("git", "-C", str(root), "rev-parse", "--short=10", "HEAD").strip()
    changed = said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return (found or "unknown") + ("+" if changed else "")


def _chip() -> str:
    if sys.platform == "darwin":  # not run here
        return said("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("model name", "hardware")):
            return " ".join(line.partition(":")[2].split())
    return platform.machine()


def _system() -> str:
    if sys.platform == "darwin":  # not run here
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    release = ".".join(platform.release().split("-")[0].split(".")[:2])
    return f"{platform.system()} {release} {platform.machine()}"


def said(*command: str) -> str:
    """What a program of the system prints; nothing if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
