"""Whatever a disk refuses, whenever: one message in words, nothing half made under the final name, and the same command
ends where an undisturbed one would."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from fake_checkpoint import make_checkpoint, make_container
from loopback_hub import LoopbackHub, folder_files
from swiftlet_repack.install import Installation
from swiftlet_repack.journal import Journal
from swiftlet_repack.pace import Pace
from swiftlet_repack.sources import Hub
from swiftlet_repack.staging import Staging

from swiftlet_mlx.errors import Cancelled, ContainerError, DiskFull, InstallError, OutputExists, RepackError

SMALL = Pace(streams=2, span_bytes=100_000, record_bytes=50_000, record_seconds=0.05)


@pytest.fixture
def source(hub: LoopbackHub, tmp_path: Path) -> Hub:
    hub.repo("Org/Model", folder_files(make_checkpoint(tmp_path / "made", shards=1, layers=1, vision=True)))
    hub.repo("Org/Made", folder_files(make_container(tmp_path / "ready", layers=1)))
    return Hub("Org/Model", endpoint=hub.endpoint)


def install(source: Hub, output: Path) -> None:
    with Installation(source, output, pace=SMALL) as work:
        work.look()
        work.carry_out()


def content(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def path_of(target: Any) -> str:
    """The path behind what a call of the system was given, a descriptor perhaps."""
    if not isinstance(target, int):
        return str(target)
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return fcntl.fcntl(target, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return os.readlink(f"/proc/self/fd/{target}")


def assert_as_if_undisturbed(source: Hub, output: Path) -> None:
    if source.repo not in UNDISTURBED:
        plain = output.with_name("plain.qpack")
        install(source, plain)
        UNDISTURBED[source.repo] = content(plain)
    assert content(output) == UNDISTURBED[source.repo]


UNDISTURBED: dict[str, dict[str, bytes]] = {}


@pytest.mark.parametrize(
    ("call", "at", "skip", "code"),
    [
        ("open", "journal", 0, errno.ENOSPC),
        ("pwrite", "journal", 0, errno.ENOSPC),
        ("pwrite", "journal", 12, errno.ENOSPC),
        ("fsync", "journal", 3, errno.EIO),
        ("open", "layer_00.bin", 0, errno.ENOSPC),
        ("ftruncate", "layer_00.bin", 0, errno.ENOSPC),
        ("open", "packed_experts", 0, errno.EIO),
        ("truncate", "spare/model.safetensors", 0, errno.EIO),
        ("fsync", "/model.safetensors", 2, errno.EDQUOT),
        ("preadv", "layer_00.bin", 2, errno.EIO),
        ("mkdir", "packed_experts", 0, errno.ENOSPC),
        ("rename", "out.qpack.partial", 0, errno.ENOSPC),
    ],
)
def test_what_the_system_refuses_is_said_and_the_same_command_continues(
    source: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: str, skip: int, code: int
) -> None:
    true_call, left = getattr(os, call), [skip]

    def refuse(target: Any, *args: Any, **options: Any) -> Any:
        if path_of(target).endswith(at):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(code, os.strerror(code))
        return true_call(target, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(
            DiskFull if code in (errno.ENOSPC, errno.EDQUOT) else (InstallError, RepackError), match=r"out\.qpack"
        ):
            install(source, tmp_path / "out.qpack")
    assert not (tmp_path / "out.qpack").exists()
    install(source, tmp_path / "out.qpack")
    assert_as_if_undisturbed(source, tmp_path / "out.qpack")


@pytest.mark.parametrize("cut", [0, 5, 100])
def test_what_a_disk_has_lost_of_a_finished_header_is_fetched_again(source: Hub, tmp_path: Path, cut: int) -> None:
    with Installation(source, tmp_path / "out.qpack", pace=SMALL) as work:
        work.look()
        work.cancel.set()
        with pytest.raises(Cancelled):
            work.carry_out()
    os.truncate(tmp_path / "out.qpack.partial/.install/spare/model.safetensors", cut)
    install(source, tmp_path / "out.qpack")
    assert_as_if_undisturbed(source, tmp_path / "out.qpack")


@pytest.mark.parametrize("repo", ["Org/Model", "Org/Made"])
def test_files_that_are_gone_though_the_journal_has_them_are_fetched_again(
    source: Hub, hub: LoopbackHub, tmp_path: Path, repo: str
) -> None:
    """A file system may lose what it was asked to keep. What was verified is not read again; the rest is."""
    again = Hub(repo, endpoint=hub.endpoint)
    with Installation(again, tmp_path / "out.qpack", pace=SMALL) as work:
        work.look()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("swiftlet_repack.transfer.Transfer._verify", lambda self: None)
            patch.setattr(Installation, "_check_headers", lambda self, repairs: work.cancel.set())
            with pytest.raises((Cancelled, KeyError)):
                work.carry_out()
    for path in (tmp_path / "out.qpack.partial").rglob("*"):
        if path.is_file() and "journal" not in path.name:
            os.truncate(path, path.stat().st_size // 3)
    install(again, tmp_path / "out.qpack")
    assert_as_if_undisturbed(again, tmp_path / "out.qpack")


def test_every_name_made_on_the_way_survives_a_power_cut(
    source: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    true_sync = os.fsync

    def sync(fd: int) -> None:
        flushed.add(os.fstat(fd).st_ino)
        true_sync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    with Installation(source, tmp_path / "out.qpack", pace=SMALL) as work:
        work.look()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Installation, "_finish", lambda self, hashes: self.cancel.set())
            work.carry_out()
    partial = tmp_path / "out.qpack.partial"
    state = partial / ".install"
    for folder in (tmp_path, partial, state, state / "spare", partial / "packed_experts"):
        assert folder.stat().st_ino in flushed, folder
    flushed.clear()
    install(source, tmp_path / "out.qpack")
    for path in (tmp_path, *(tmp_path / "out.qpack").rglob("*")):
        assert path.stat().st_ino in flushed, path


def test_what_does_not_open_at_the_end_never_gets_the_name(
    source: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_finish = Installation._finish

    def finish(self: Installation, hashes: Any) -> None:
        os.truncate(tmp_path / "out.qpack.partial/packed_experts/layer_00.bin", 100)  # somebody else is at the disk
        true_finish(self, hashes)

    monkeypatch.setattr(Installation, "_finish", finish)
    with pytest.raises(ContainerError, match=r"layer_00\.bin"):
        install(source, tmp_path / "out.qpack")
    assert not (tmp_path / "out.qpack").exists()


def test_the_lock_is_held_until_the_container_has_its_name(
    source: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_rename, held = os.rename, []

    def rename(before: Any, after: Any) -> None:
        held.append(Journal.in_use(Path(before) / ".install" / "journal"))
        true_rename(before, after)

    monkeypatch.setattr(os, "rename", rename)
    install(source, tmp_path / "out.qpack")
    assert held == [True]


def test_who_comes_between_a_finish_and_its_lock_is_told_that_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_open = Journal.open

    def late(path: Path) -> Journal:
        make_container(tmp_path / "out.qpack")
        return true_open(path)

    monkeypatch.setattr(Journal, "open", late)
    with pytest.raises(OutputExists, match="not overwritten"):
        Staging(tmp_path / "out.qpack").open()
    assert not (tmp_path / "out.qpack.partial").exists()
