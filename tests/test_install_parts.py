"""The bookkeeping of an installation: extents, journal, and the routes bytes take to their places."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swiftlet_repack.delivery import Delivery, Repair
from swiftlet_repack.early import EarlyHashes
from swiftlet_repack.extents import Extents
from swiftlet_repack.flush import Flusher
from swiftlet_repack.journal import Journal
from swiftlet_repack.names import check_names
from swiftlet_repack.origin import RemoteFile
from swiftlet_repack.places import Places, Route, Segment

from swiftlet_mlx.errors import DiskFull, InstallError, NotResumable, RepackError, UnsafePath

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])))


@given(INTERVALS)
def test_extents_are_the_set_of_bytes_added(intervals: list[tuple[int, int]]) -> None:
    extents = Extents(intervals)
    model = {n for start, stop in intervals for n in range(start, stop)}
    assert {n for start, stop in extents for n in range(start, stop)} == model
    assert extents.nbytes == len(model)
    parts = list(extents)
    assert all(a < b for a, b in parts)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(parts))
    missing = {n for start, stop in extents.missing(3, 70) for n in range(start, stop)}
    assert missing == set(range(3, 70)) - model
    for start in range(72):
        end = start
        while end in model:
            end += 1
        assert extents.covered_to(start) == end


def test_an_interval_that_is_none_is_refused() -> None:
    for bad in [(-1, 3), (4, 3)]:
        with pytest.raises(ValueError, match="not an interval"):
            Extents([bad])


def test_a_journal_remembers_across_opening(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.open(path) as journal:
        assert journal.begin({"source": "Org/Model", "commit": "a" * 40}) is False
        journal.done(("x", 0, 10))
        journal.done(("x", 20, 30))
        journal.done(("x", 10, 15))
        journal.mark_verified("y", "f" * 64)
        journal.note("etag", [1, 2])
    with Journal.open(path) as journal:
        assert journal.begin({"commit": "a" * 40, "source": "Org/Model"}) is True
        assert list(journal.extents["x"]) == [(0, 15), (20, 30)]
        assert journal.covered_to("x", 0) == 15
        assert journal.covered_to("never", 7) == 7
        assert journal.missing("x", 32) == [(15, 20), (30, 32)]
        assert journal.verified == {"y": "f" * 64}
        assert journal.notes == {"etag": [1, 2]}
        assert journal.done_bytes() == 25


def test_unflushed_records_count_until_the_machine_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    monkeypatch.setattr("swiftlet_repack.journal.boot_id", lambda: "monday")
    with Journal.open(path) as journal:
        journal.begin({"source": "s"})
        journal.wrote("x", 0, 10)
        journal.done(("x", 0, 4))
        journal.wrote("y", 5, 6)
    with Journal.open(path) as journal:  # killed, and begun again
        assert list(journal.extents["x"]) == [(0, 10)]
        assert list(journal.extents["y"]) == [(5, 6)]
        journal.wrote("x", 10, 12)
    for boot in ("tuesday", None):  # the power went, or the system does not say
        monkeypatch.setattr("swiftlet_repack.journal.boot_id", lambda boot=boot: boot)
        with Journal.open(path) as journal:
            assert list(journal.extents["x"]) == [(0, 4)]
            assert "y" not in journal.extents
            journal.wrote("z", 0, 1)
    with Journal.open(path) as journal:
        assert "z" not in journal.extents  # two runs without a boot id are not taken for one


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"source": "Org/Other", "settings": {"mtp": True}}, ["source", "Org/Model", "Org/Other"]),
        ({"source": "Org/Model", "settings": {"mtp": False}}, ["settings mtp", "True", "False"]),
        ({"source": "Org/Model"}, ["settings"]),
    ],
)
def test_another_source_or_setting_is_refused_by_name(tmp_path: Path, now: dict[str, object], named: list[str]) -> None:
    with Journal.open(tmp_path / "journal") as journal:
        journal.begin({"source": "Org/Model", "settings": {"mtp": True}})
    with Journal.open(tmp_path / "journal") as journal, pytest.raises(NotResumable) as caught:
        journal.begin(now)
    assert all(word in str(caught.value) for word in [*named, "--restart", "--output"])


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_line_cut_short_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    with Journal.open(path) as journal:
        journal.begin({"source": "s"})
        journal.done(("x", 0, 10))
        whole = path.stat().st_size
        journal.done(("x", 10, 123_456_789))
    size = path.stat().st_size
    os.truncate(path, max(whole, size - cut))
    with Journal.open(path) as journal:
        assert list(journal.extents["x"]) == [(0, 10)]
        assert path.stat().st_size == whole
        journal.done(("x", 50, 60))
    with Journal.open(path) as journal:
        assert list(journal.extents["x"]) == [(0, 10), (50, 60)]


def test_what_follows_a_damaged_line_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.open(path) as journal:
        journal.begin({"source": "s"})
        journal.done(("x", 0, 10))
    with path.open("ab") as stream:
        stream.write(b'{"done": ["x", 5\n{"done": ["x", 10, 20]}\n')
    with Journal.open(path) as journal:
        assert list(journal.extents["x"]) == [(0, 10)]


@given(st.binary(max_size=200))
@settings(max_examples=60)
def test_a_journal_of_anything_opens_or_is_refused(noise: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.write_bytes(noise)
        with Journal.open(path) as journal:
            assert journal.begin({"source": "s"}) is False


def test_a_journal_of_another_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    path.write_text(json.dumps({"format": 1, "identity": {}}) + "\n")  # had no checksums
    with pytest.raises(NotResumable, match=r"format 1\b.*--restart"):
        Journal.open(path)
    path.unlink()
    with monkeypatch.context() as patch, Journal.open(path) as journal:
        patch.setattr("swiftlet_repack.journal.FORMAT", 99)
        journal.begin({"source": "s"})
    with pytest.raises(NotResumable, match=r"format 99\b.*--restart"):
        Journal.open(path)


def test_whichever_bit_of_a_journal_flips_nothing_is_believed_that_was_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def state() -> tuple[object, ...]:
        with Journal.open(path) as journal:
            spans = {name: list(extents) for name, extents in journal.extents.items()}
            return journal.identity, spans, journal.verified, journal.notes

    with Journal.open(path) as journal:
        journal.begin({"source": "s", "commit": "a" * 40})
        journal.note("plan", "p")
        journal.done(("x", 0, 10))
        journal.wrote("y", 100, 200)
        journal.mark_verified("x", "f" * 64)
        journal.done(("y", 300, 400))
    whole = path.read_bytes()
    ends = [0, *(n + 1 for n, byte in enumerate(whole) if byte == 10)]
    recorded = []
    for end in ends:
        path.write_bytes(whole[:end])
        recorded.append(state())
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        before = sum(end <= at for end in ends) - 1
        assert state() == recorded[before], at


def test_two_installations_cannot_share_a_journal(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal"), pytest.raises(NotResumable, match="another process"):
        Journal.open(tmp_path / "journal")
    Journal.open(tmp_path / "journal").close()


def test_a_lock_on_a_journal_that_has_moved_away_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_lock = fcntl.flock

    def late(fd: int, how: int) -> None:
        (tmp_path / "journal").rename(tmp_path / "finished")  # its owner ends between our opening and our locking
        true_lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(NotResumable, match="another process"):
        Journal.open(tmp_path / "journal")


def test_a_file_system_without_locks_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InstallError, match=r"cannot lock files.*--output"):
        Journal.open(tmp_path / "journal")


def _record_for_ever(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.begin({"source": "s"})
        for n in range(1_000_000):
            journal.done(("x", n * 10, n * 10 + 10))


def test_a_kill_in_the_middle_of_recording_leaves_a_journal_that_opens(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_record_for_ever, args=(tmp_path / "journal",))
    process.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (tmp_path / "journal").exists() and (tmp_path / "journal").stat().st_size > 2000:
            break
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with Journal.open(tmp_path / "journal") as journal:
        assert journal.begin({"source": "s"}) is True
        ((start, stop),) = journal.extents["x"]
        assert start == 0
        assert stop > 100


def test_bytes_are_recorded_as_done_only_after_their_files_were_flushed(tmp_path: Path) -> None:
    route = Route(8, [Segment(0, 4, "a"), Segment(4, 4, "b")])
    delivery = Delivery(RemoteFile("x", "http://x", 8), route)
    order: list[object] = []

    class Watched(Places):
        def sync(self, targets: Iterable[str]) -> None:
            order.append(set(targets))
            super().sync(order[-1])  # type: ignore[arg-type]

    with Journal.open(tmp_path / "journal") as journal, Watched(tmp_path) as places:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "done", lambda *ranges: order.append(ranges))
            flusher = Flusher(places, journal, order.append)
            flusher.start()
            places.write(route, 0, b"abcdef")
            flusher.wrote(delivery, 0, 6)
            flusher.finish()
        assert order == [{"a", "b"}, (("x", 0, 6),)]
        failed: list[BaseException] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(places, "sync", lambda targets: (_ for _ in ()).throw(DiskFull("full")))
            flusher = Flusher(places, journal, failed.append)
            flusher.start()
            flusher.wrote(delivery, 0, 6)
            flusher.finish()
        assert [type(error) for error in failed] == [DiskFull]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swiftlet_repack.journal.boot_id", lambda: "the next day")
        with Journal.open(tmp_path / "journal") as journal:
            assert journal.missing("x", 8) == [(0, 8)]


def test_what_is_mended_after_it_was_hashed_is_hashed_again(tmp_path: Path) -> None:
    delivery = Delivery(RemoteFile("x", "http://x", 8), Route(8, [Segment(0, 4, "a"), Segment(4, 4, "b")]))
    for name in "ab":
        (tmp_path / name).write_bytes(b"oops")
    with Journal.open(tmp_path / "journal") as journal, ThreadPoolExecutor(1) as pool:
        hashes = EarlyHashes([delivery], {"a": 4, "b": 4}, tmp_path, journal, pool, threading.Event())
        hashes.look()
        assert hashes._hashes == {}  # nothing is in place yet
        journal.wrote("x", 0, 8)
        hashes.look()
        wait(hashes._hashes.values())
        (tmp_path / "b").write_bytes(b"good")
        found = hashes.result([Repair("x", 5, 7)], lambda moment: None)
    assert found == {"a": hashlib.sha256(b"oops").hexdigest(), "b": hashlib.sha256(b"good").hexdigest()}


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """A random cut of a source into segments, each scattered into its own region of one of three targets."""
    segments, at = [], 0
    free = {"a": 0, "packed_experts/b.bin": 5, "c": 0}
    for _ in range(draw(st.integers(1, 6))):
        target = draw(st.sampled_from(sorted(free)))
        size, count, gap = draw(st.integers(1, 30)), draw(st.integers(1, 5)), draw(st.integers(0, 9))
        segments.append(Segment(at, size, target, free[target], count, size + gap))
        free[target] += count * (size + gap) + draw(st.integers(0, 3))
        at += size * count
    order = draw(st.permutations(segments))
    return Route(at, order)


@given(routes(), st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_what_is_written_through_a_route_in_any_order_reads_back(route: Route, rng: random.Random) -> None:
    import tempfile

    data = rng.randbytes(route.size)
    cuts = sorted({0, route.size, *(rng.randrange(route.size + 1) for _ in range(5))})
    parts = list(itertools.pairwise(cuts))
    rng.shuffle(parts)
    with tempfile.TemporaryDirectory() as folder, Places(Path(folder)) as places:
        for start, stop in parts:
            places.write(route, start, data[start:stop])
        places.sync(route.targets())
        start, stop = sorted(rng.randrange(route.size + 1) for _ in range(2))
        assert b"".join(places.read(route, start, stop)) == data[start:stop]
        assert b"".join(places.read(route, 0, route.size)) == data
        for segment in route.segments:
            content = Path(folder, segment.target).read_bytes()
            for run in range(segment.count):
                at, here = segment.start + run * segment.size, segment.offset + run * segment.stride
                assert content[here : here + segment.size] == data[at : at + segment.size]


def test_files_get_their_size_at_once_and_gaps_read_as_zeros(tmp_path: Path) -> None:
    with Places(tmp_path, {"layer.bin": 100, "empty": 0}) as places:
        places.create()
        places.write(Route(4, [Segment(0, 2, "layer.bin", 0, 2, 50)]), 0, b"abcd")
    content = (tmp_path / "layer.bin").read_bytes()
    assert len(content) == 100
    assert content == b"ab" + bytes(48) + b"cd" + bytes(48)
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, 5, "a")],
        [Segment(0, 5, "a"), Segment(6, 4, "a", 5)],
        [Segment(0, 6, "a"), Segment(5, 5, "a", 6)],
        [Segment(0, 11, "a")],
        [],
    ],
)
def test_a_route_with_a_gap_or_an_overlap_cannot_exist(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match=r"source bytes|segments end"):
        Route(10, segments)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a\\b", "a\nb", "./a", "a//b", "C:/x"])
def test_a_path_out_of_the_folder_is_never_opened(path: str) -> None:
    with pytest.raises(UnsafePath):
        Segment(0, 1, path)


@pytest.mark.parametrize(
    "names",
    [
        ["a", "A"],
        ["stra\u00dfe", "STRASSE"],
        ["caf\u00e9", "cafe\u0301"],  # one letter or two: the same name to macOS
        ["\u212b/x", "\u00e5/X"],
        ["a", "A/b"],
        ["a/b.", "c"],
        ["a ", "c"],
        ["a./b"],
        ["\u00e9" * 128],
        [".INSTALL/x"],
        ["Hashes.json"],
        ["SOURCE.json"],
    ],
)
def test_names_that_some_file_system_cannot_keep_apart_are_refused(names: list[str]) -> None:
    with pytest.raises(UnsafePath, match="Org/Model"):
        check_names(names, "Org/Model")


def test_names_that_every_file_system_keeps_apart_pass() -> None:
    check_names(["a", "ab", "b/a", "b/c.d", "\u00e9" * 127, "hashes.json", "source.json", "x/SOURCE.json"], "Org/Model")


def test_runs_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        Segment(0, 10, "a", 0, 2, 9)


def test_a_full_disk_is_said_in_words(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "a").symlink_to("/dev/full")
    with Places(tmp_path) as places, pytest.raises(DiskFull, match=r"a.*same command"):
        places.write(Route(4, [Segment(0, 4, "a")]), 0, b"abcd")


def test_what_a_file_lost_reads_as_zeros_until_it_is_finished(
    tmp_path: Path,
) -> None:
    route = Route(4, [Segment(0, 4, "a")])
    places = Places(tmp_path)
    places.write(route, 0, b"abcd")
    os.truncate(tmp_path / "a", 2)
    assert list(places.read(route, 0, 4)) == [b"ab\0\0"]
    with Places(tmp_path, read_only=True) as finished, pytest.raises(RepackError, match="ends at byte 2"):
        list(finished.read(route, 0, 4))
    places.close()
    with pytest.raises(RepackError, match="closed"):
        places.write(route, 0, b"abcd")
