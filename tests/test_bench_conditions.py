"""Swapping, heat and other programs around a run: Linux from made-up /proc, macOS from what its programs print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from swiftlet_bench import conditions
from swiftlet_bench.conditions import Moment, Watch

PAGE = os.sysconf("SC_PAGE_SIZE")
LEVEL = conditions.THERMAL_PRESSURE
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                3632.
Pageins:                                1409311.
Pageouts:                                 18310.
Swapins:                                    640.
Swapouts:                                  2304.
"""
CALM = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
LIMITED = """Note: No thermal warning level has been recorded
CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= {}
"""


def test_what_a_mac_has_swapped_is_counted_in_its_own_pages() -> None:
    assert conditions.mac_swapped_bytes(VM_STAT) == 2304 * 16384
    for text in ("", VM_STAT.replace("Swapouts", "Others"), VM_STAT.replace("16384", "?")):
        assert conditions.mac_swapped_bytes(text) is None


@pytest.mark.parametrize(
    ("notifyutil", "pmset", "throttled"),
    [
        (f"{LEVEL} 0\n", CALM, 0),
        (f"{LEVEL} 2\n", CALM, 2),
        (f"{LEVEL} 0\n", LIMITED.format(100), 0),
        ("", LIMITED.format(62), 1),
        ("", CALM, 0),
        ("", "Thermal Warning Level = 1\n", 1),
        ("Failed: 1000000\n", "", None),
    ],
)
def test_a_mac_that_is_too_warm_says_so_in_one_way_or_another(
    notifyutil: str, pmset: str, throttled: int | None
) -> None:
    assert conditions.mac_throttled(notifyutil, pmset) == throttled


def test_linux_counts_pages_ticks_and_throttling(tmp_path: Path) -> None:
    assert conditions.swapped_bytes(tmp_path) is None
    assert conditions._busy_seconds(tmp_path) is None
    assert conditions._throttle_events(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("pswpin 7\npswpout 3\n")
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 9999 888 4 5 6 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    for n, count in enumerate((2, 5)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{n}/thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{count}\n")
    assert conditions.swapped_bytes(tmp_path) == 3 * PAGE
    assert conditions._busy_seconds(tmp_path) == (100 + 20 + 30 + 4 + 5 + 6) / os.sysconf("SC_CLK_TCK")
    assert conditions._throttle_events(tmp_path) == 7


def moments(monkeypatch: pytest.MonkeyPatch, *found: Moment) -> dict[str, float]:
    left = iter(found)
    monkeypatch.setattr(conditions, "now", lambda: next(left))
    return Watch().values()


def test_a_run_gets_the_difference_and_what_is_unknown_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert moments(monkeypatch, Moment(None, None, None), Moment(5, 5, 5.0)) == {}
    found = moments(monkeypatch, Moment(10, 3, 0.0), Moment(25, 3, 1e9))
    assert found == {"swap_written_bytes": 15, "throttled": 0, "others_cpu_share": 1.0}
    assert moments(monkeypatch, Moment(10, 3, 5.0), Moment(10, 4, 0.0)) == {
        "swap_written_bytes": 0, "throttled": 1, "others_cpu_share": 0.0,
    }  # fmt: skip


def test_on_a_mac_a_run_that_began_warm_was_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert moments(monkeypatch, Moment(None, 2, None), Moment(None, 0, None)) == {"throttled": 1}
    assert moments(monkeypatch, Moment(None, 0, None), Moment(None, 0, None)) == {"throttled": 0}


def test_spoiled_runs_are_flagged_and_quiet_ones_are_not() -> None:
    quiet = {"swap_written_bytes": (0.0, 0.0), "throttled": (0.0, 0.0), "others_cpu_share": (0.02, 0.03)}
    assert conditions.flags(quiet) == conditions.flags({}) == []
    spoiled = {"swap_written_bytes": (0.0, 4e6), "throttled": (0.0, 1.0), "others_cpu_share": (0.02, 0.5)}
    words = "; ".join(conditions.flags(spoiled))
    for word in ("4.0 MB", "1 of 2 runs", "50%"):
        assert word in words


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_says_something_about_itself() -> None:
    values = Watch().values()
    assert values["swap_written_bytes"] >= 0
    assert 0 <= values["others_cpu_share"] <= 1
