"""What the system says about memory, from made-up /proc and control groups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swiftlet_mlx.machine import UNLIMITED, Pressure, available_bytes, pressure, sysctl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="made-up /proc is read on Linux only")
GB = 10**9


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {64 * GB // 1024} kB\nHugePages_Total:  0\n")
    write(tmp_path / "proc/self/cgroup", "0::/user/app\n")
    return tmp_path


def group(root: Path, path: str, limit: str, anon: int, file: int = 0, **more: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    write(folder / "memory.max", limit + "\n")
    lines = [f"anon {anon}", f"file {file}", *(f"{k} {v}" for k, v in more.items())]
    write(folder / "memory.stat", "\n".join(lines) + "\n")
    write(folder / "memory.current", str(anon + file))


def test_without_a_limit_the_hosts_free_memory_counts(root: Path) -> None:
    assert abs(available_bytes(root) - 64 * GB) < 2048
    group(root, "user/app", "max", 1 * GB)
    assert abs(available_bytes(root) - 64 * GB) < 2048


def test_a_groups_limit_counts_less_what_cannot_be_given_back(root: Path) -> None:
    group(root, "user/app", str(4 * GB), anon=GB // 2, file=3 * GB)  # most of what it uses is page cache
    assert available_bytes(root) == 4 * GB - GB // 2
    group(root, "user/app", str(4 * GB), anon=GB // 2, shmem=GB, kernel=GB // 4)
    assert available_bytes(root) == 4 * GB - 7 * GB // 4


def test_the_tightest_group_above_counts(root: Path) -> None:
    group(root, "user/app", str(8 * GB), anon=0)
    group(root, "user", str(3 * GB), anon=GB)
    assert available_bytes(root) == 2 * GB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    group(root, "user/app", str(GB), anon=2 * GB)
    assert available_bytes(root) == 0


def test_groups_of_the_old_kind_are_read(root: Path) -> None:
    old = root / "sys/fs/cgroup/memory"
    write(old / "memory.limit_in_bytes", str(5 * GB))
    write(old / "memory.stat", f"cache {3 * GB}\ntotal_rss {GB}\n")
    assert available_bytes(root) == 4 * GB


def test_a_cgroup_path_that_climbs_out_is_not_followed(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/../../../etc\n")
    assert available_bytes(root) > 0
    assert pressure(root) is Pressure.NORMAL


def test_a_system_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == UNLIMITED
    assert pressure(tmp_path) is Pressure.NORMAL


@pytest.mark.parametrize(
    ("some", "full", "grade"),
    [
        (0.0, 0.0, Pressure.NORMAL),
        (3.0, 1.5, Pressure.NORMAL),
        (12.5, 2.0, Pressure.WARNING),
        (30.0, 9.0, Pressure.CRITICAL),
    ],
)
@pytest.mark.parametrize("where", ["proc/pressure/memory", "sys/fs/cgroup/user/memory.pressure"])
def test_waiting_for_memory_is_pressure(root: Path, where: str, some: float, full: float, grade: Pressure) -> None:
    line = "{} avg10={:.2f} avg60=0.00 avg300=0.00 total=5\n"
    write(root / where, line.format("some", some) + line.format("full", full))
    assert pressure(root) is grade


def test_this_machine_answers() -> None:
    assert 10**7 < available_bytes() < UNLIMITED
    assert pressure() in tuple(Pressure)
    assert sysctl("kern.memorystatus_vm_pressure_level") is None or sys.platform == "darwin"
