"""Whole files through bad lines to scattered places: byte for byte right in the end, or refused by name."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_hub import Fault, LoopbackHub
from swiftlet_repack.delivery import Delivery
from swiftlet_repack.fetch import Fetcher
from swiftlet_repack.hashing import FileHashes
from swiftlet_repack.hub import Hub, Listing
from swiftlet_repack.journal import Journal
from swiftlet_repack.pace import Pace
from swiftlet_repack.patience import Patience
from swiftlet_repack.places import Places, Route, Segment
from swiftlet_repack.transfer import Progress, Transfer

from swiftlet_mlx.errors import Cancelled, DiskFull, HashMismatch, NetworkFailed, SwiftletError

HASTY = Patience(
    stall_seconds=2, connect_seconds=1, first_wait=0.005, longest_wait=0.02, give_up_seconds=0.2,
    first_contact_tries=3, wrong_answer_tries=3,
)  # fmt: skip
SMALL = Pace(streams=4, span_bytes=100_000, record_bytes=20_000, record_seconds=0.05)
FILES = {
    "a.safetensors": random.Random(1).randbytes(640_000),
    "b.safetensors": random.Random(2).randbytes(250_003),
    "config.json": b'{"x": 1}',
    "empty.txt": b"",
}


@pytest.fixture
def hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    monkeypatch.setattr("swiftlet_repack.fetch.DIRECT_BYTES", 80_000)  # most spans here, as in earnest
    hub.repo("Org/Model", FILES)
    return hub


def scattered(name: str, size: int) -> Route:
    """Most of a file as 16 runs in one target, the rest in others: a small picture of a shard."""
    if not name.endswith(".safetensors"):
        return Route(size, [Segment(0, size, name)])
    run = size // 20
    tail = size - 16 * run - 1000
    return Route(
        size,
        [
            Segment(0, 1000, "dense", 0),
            Segment(1000, run, f"{name}.experts", 7, 16, run + 11),
            Segment(1000 + 16 * run, tail, f"{name}.rest"),
        ],
    ) if name.startswith("a") else Route(size, [Segment(0, size, f"{name}.whole")])  # fmt: skip


class Run:
    """One installation's worth of objects on one folder; `go` makes a new run, as a new process would."""

    def __init__(self, hub: LoopbackHub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.origin = Hub("Org/Model", endpoint=hub.endpoint)
        self.listing: Listing | None = None
        self.cancel = threading.Event()
        self.seen: list[Progress] = []
        self.passing: dict[str, int] = {}
        self.on_verified: Callable[[Delivery], None] | None = None
        self.transfer: Transfer
        folder.mkdir(exist_ok=True)

    def go(
        self,
        pace: Pace = SMALL,
        *,
        patience: Patience = HASTY,
        watch: Callable[[Progress], None] | None = None,
    ) -> Transfer:
        self.cancel = threading.Event()
        fetcher = Fetcher(self.origin, patience=patience, cancel=self.cancel)
        if self.listing is None:
            self.listing = self.origin.listing(fetcher)
        files = sorted(self.listing.files.values(), key=lambda f: -self.passing.get(f.name, 0))
        self.deliveries = [Delivery(f, scattered(f.name, f.size), self.passing.get(f.name, 0)) for f in files]
        with Journal.open(self.folder / "journal") as journal, Places(self.folder) as places:
            journal.begin({"commit": self.listing.commit})
            self.transfer = Transfer(
                self.deliveries, fetcher, places, journal, pace=pace, on_progress=watch or self.seen.append,
                on_verified=self.on_verified,
            )  # fmt: skip
            self.transfer.run()
        return self.transfer

    def check(self) -> None:
        with Places(self.folder) as places:
            for delivery in self.deliveries:
                name = delivery.file.name
                assert b"".join(places.read(delivery.route, 0, delivery.file.size)) == FILES[name]
        with Journal.open(self.folder / "journal") as journal:
            assert set(journal.verified) == set(FILES)


def test_every_file_arrives_once_and_is_verified(hub: LoopbackHub, tmp_path: Path) -> None:
    run = Run(hub, tmp_path)
    transfer = run.go()
    run.check()
    assert hub.body_bytes() == sum(map(len, FILES.values()))
    last = run.seen[-1]
    assert last.done_bytes == last.fetched_bytes == last.hashed_bytes == last.total_bytes
    assert last.verified_files == last.files == len(FILES)
    assert transfer.repairs == []


def test_a_file_counts_as_verified_only_after_all_its_places_were_flushed(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave a hole that nobody looks at again."""
    unflushed: dict[str, set[str]] = {}
    true_write, true_sync, true_mark = Places.write, Places.sync, Journal.mark_verified
    marked: list[str] = []

    def write(self: Places, route: Route, at: int, data: bytes) -> None:
        for target in route.targets():
            unflushed.setdefault(target, set()).add("written")
        true_write(self, route, at, data)

    def sync(self: Places, targets: Iterable[str]) -> None:
        every = set(targets)
        true_sync(self, every)
        for target in every:
            unflushed.pop(target, None)

    def mark(self: Journal, name: str, digest: str) -> None:
        marked.extend(target for target in scattered(name, len(FILES[name])).targets() & set(unflushed))
        true_mark(self, name, digest)

    monkeypatch.setattr("swiftlet_repack.flush.SYNC_SECONDS", 60.0)
    for owner, name, function in ((Places, "write", write), (Places, "sync", sync), (Journal, "mark_verified", mark)):
        monkeypatch.setattr(owner, name, function)
    run = Run(hub, tmp_path)
    run.go()
    run.check()
    assert marked == []


def test_no_more_streams_than_asked_for(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.bytes_per_second = 2_000_000
    true_stream, active, peak, lock = Fetcher.stream, [0], [0], threading.Lock()

    def counted(self: Fetcher, *args: Any) -> None:
        with lock:
            active[0] += 1
            peak[0] = max(peak[0], active[0])
        try:
            true_stream(self, *args)
        finally:
            with lock:
                active[0] -= 1

    monkeypatch.setattr(Fetcher, "stream", counted)
    run = Run(hub, tmp_path)
    run.go(Pace(streams=3, span_bytes=50_000, record_bytes=20_000))
    run.check()
    assert peak == [3]


def test_a_second_run_fetches_nothing(hub: LoopbackHub, tmp_path: Path) -> None:
    run = Run(hub, tmp_path)
    run.go()
    hub.forget()
    run.go()
    run.check()
    assert hub.requests == []


def test_streams_wait_for_the_hashes_but_not_for_what_an_earlier_run_left(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftlet_repack.transfer.AHEAD_BYTES", 50_000)
    monkeypatch.setattr("swiftlet_repack.transfer.HASH_BYTES", 10_000)
    monkeypatch.setattr("swiftlet_repack.transfer.LOOK_BYTES", 10_000)
    true_update, ahead = FileHashes.update, [0]

    def slow(self: FileHashes, block: Any) -> None:
        time.sleep(0.003)
        true_update(self, block)
        if len(block) == 10_000:
            ahead.append(run.transfer._progress.fetched_bytes - run.transfer._progress.hashed_bytes)

    monkeypatch.setattr(FileHashes, "update", slow)
    pace = Pace(streams=2, span_bytes=30_000, last_span_bytes=30_000, record_bytes=10_000)
    hub.bytes_per_second = 6_000_000  # four times what is hashed a second
    run = Run(hub, tmp_path)
    run.go(pace)
    run.check()
    assert 0 < max(ahead) <= 250_000
    with Journal.open(tmp_path / "journal") as journal:
        lines = journal.path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b"verified" not in line]
    (tmp_path / "journal").write_bytes(b"".join(kept[:-1] if b"done" in kept[-1] else kept))
    hub.forget()
    run.go(pace)  # all is here and nothing is verified: everything is hashed again, nobody is waited for
    run.check()
    assert hub.body_bytes("*.safetensors") <= 2 * 30_000


def test_what_only_passes_through_lies_in_the_place_of_what_is_still_to_come(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of b, 200,000 bytes are given back once it is verified; while they lie there, as much of a must not."""
    held, true_update = [200_000], FileHashes.update

    def slow(self: FileHashes, block: Any) -> None:
        time.sleep(0.004)
        true_update(self, block)

    def verified(delivery: Delivery) -> None:
        if delivery.passing_bytes:
            moment = run.transfer._progress
            fetched_of_a = moment.done_bytes - len(FILES["b.safetensors"])
            held.append(fetched_of_a)

    monkeypatch.setattr(FileHashes, "update", slow)
    monkeypatch.setattr("swiftlet_repack.transfer.HASH_BYTES", 10_000)
    run = Run(hub, tmp_path)
    run.passing, run.on_verified = {"b.safetensors": 200_000}, verified
    run.go()
    run.check()
    assert 0 < held[1] <= len(FILES["a.safetensors"]) + len(FILES["config.json"]) - 200_000


@given(
    holes=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5000)), max_size=6),
    after=st.integers(0, 9000), span=st.integers(1, 900), last=st.integers(1, 900), streams=st.integers(1, 5),
)  # fmt: skip
def test_spans_follow_each_other_and_shrink_towards_the_end(
    holes: list[tuple[int, int]], after: int, span: int, last: int, streams: int
) -> None:
    gaps, at = list[tuple[int, int]](), 0
    for skipped, length in holes:
        gaps.append((at + skipped, at + skipped + length))
        at += skipped + length + 1
    pace = Pace(streams=streams, span_bytes=span, last_span_bytes=last)
    spans = list(pace.cut(gaps, after))
    left = after + sum(stop - start for start, stop in gaps)
    for start, stop in gaps:
        inside = [s for s in spans if start <= s[0] < stop]
        assert [a for a, _ in inside] == [start, *(b for _, b in inside[:-1])]
        assert inside[-1][1] == stop
    for start, stop in spans:
        assert 0 < stop - start <= max(1, min(span, max(last, left // streams)))
        left -= stop - start
    assert left == after


@pytest.mark.parametrize("seed", range(8))
def test_random_interruptions_cost_at_most_what_was_not_flushed(hub: LoopbackHub, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    run = Run(hub, tmp_path)
    hub.bytes_per_second = 4_000_000
    for _ in range(5):
        stop_at = rng.randrange(sum(map(len, FILES.values())))

        def watch(moment: Progress, stop_at: int = stop_at) -> None:
            if moment.done_bytes >= stop_at:
                run.cancel.set()

        hub.faults[:] = [
            Fault("drop", "*.safetensors", at=rng.randrange(90_000), times=rng.randrange(3)),
            Fault("status", "*", value=503, times=rng.randrange(3)),
        ]
        try:
            run.go(watch=watch)
            break
        except Cancelled:
            pass
    hub.bytes_per_second = 0
    run.go()
    run.check()


@given(
    cuts=st.lists(st.tuples(st.integers(0, 120_000), st.sampled_from(["drop", "close"])), max_size=5),
    flips=st.lists(st.integers(0, 639_999), max_size=2),
    stop_at=st.integers(0, 1_000_000),
)
@settings(max_examples=12)
def test_wherever_it_is_cut_every_byte_is_right_in_the_end(
    hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory, cuts: Any, flips: list[int], stop_at: int
) -> None:
    run = Run(hub, tmp_path_factory.mktemp("cut"))

    def watch(moment: Progress) -> None:
        if moment.fetched_bytes >= stop_at:
            run.cancel.set()

    hub.faults[:] = [
        *(Fault(kind, "*.safetensors", at=at, times=1) for at, kind in cuts),
        *(Fault("corrupt", "a.safetensors", at=at, times=1) for at in flips),
    ]
    with contextlib.suppress(Cancelled):
        run.go(watch=watch)
    run.go()
    run.check()


@pytest.mark.parametrize("at", [0, 999, 1000, 345_678, 639_999])
def test_a_flipped_byte_is_found_named_and_mended(hub: LoopbackHub, tmp_path: Path, at: int) -> None:
    hub.faults.append(Fault("corrupt", "a.safetensors", at=at, times=1))
    run = Run(hub, tmp_path)
    transfer = run.go()
    run.check()
    assert [(r.file, r.start, r.stop) for r in transfer.repairs] == [("a.safetensors", at, at + 1)]


def test_only_what_lies_before_the_wrong_byte_travels_again(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftlet_repack.mend.REPAIR_BYTES", 10_000)
    hub.faults.append(Fault("corrupt", "a.safetensors", at=123_456, times=1))
    run = Run(hub, tmp_path)
    run.go()
    run.check()
    assert hub.body_bytes("a.safetensors") == len(FILES["a.safetensors"]) + 130_000


def test_several_wrong_places_are_all_mended(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftlet_repack.mend.REPAIR_BYTES", 10_000)
    places = [5, 150_000, 250_001, 420_000, 639_999]
    hub.faults.extend(Fault("corrupt", "a.safetensors", at=at, times=1) for at in places)
    run = Run(hub, tmp_path)
    transfer = run.go()
    run.check()
    assert [r.start for r in transfer.repairs] == places


def test_a_source_whose_bytes_never_fit_its_hash_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("corrupt", "b.safetensors", at=77))
    run = Run(hub, tmp_path)
    with pytest.raises(HashMismatch, match=r"b.safetensors.*announces"):
        run.go()
    hub.faults.clear()  # the source is put right: the next run mends what is there
    transfer = run.go()
    run.check()
    assert [(r.file, r.start) for r in transfer.repairs] == [("b.safetensors", 77)]


def test_a_small_file_is_verified_by_its_git_object_id(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("corrupt", "config.json", at=3))
    with pytest.raises(HashMismatch, match=r"config\.json"):
        Run(hub, tmp_path).go()


def test_bytes_that_rot_on_disk_between_two_runs_are_mended(hub: LoopbackHub, tmp_path: Path) -> None:
    run = Run(hub, tmp_path)
    hub.faults.append(Fault("status", "a.safetensors", "cdn", skip=3, value=500))
    with pytest.raises(NetworkFailed):
        run.go()
    hub.faults.clear()
    with Journal.open(tmp_path / "journal") as journal:
        ((start, _), *_) = journal.extents["a.safetensors"]
    with Places(tmp_path) as places:
        route = scattered("a.safetensors", len(FILES["a.safetensors"]))
        places.write(route, start, bytes([FILES["a.safetensors"][start] ^ 1]))
    transfer = run.go()
    run.check()
    assert [(r.start, r.stop) for r in transfer.repairs] == [(start, start + 1)]


def test_a_source_that_ignores_ranges_is_not_downloaded_over_and_over(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("no_range"))
    run = Run(hub, tmp_path)
    run.go(Pace(streams=2, span_bytes=10_000, record_bytes=10_000))
    run.check()
    assert hub.body_bytes() < 3 * sum(map(len, FILES.values()))


def test_a_full_disk_stops_everything_and_the_rest_comes_later(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swiftlet_repack import places as module

    true_write, budget = module._pwrite_all, [300_000]

    def limited(fd: int, view: memoryview, offset: int) -> None:
        budget[0] -= len(view)
        if budget[0] < 0:
            raise OSError(28, "No space left on device")
        true_write(fd, view, offset)

    run = Run(hub, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_pwrite_all", limited)
        with pytest.raises(DiskFull, match="same command"):
            run.go()
    run.go()
    run.check()
    assert 0 < run.seen[-1].fetched_bytes < sum(map(len, FILES.values())) - 100_000


def test_an_interrupt_in_the_watcher_stops_the_streams_soon_and_keeps_the_rest(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.bytes_per_second = 400_000

    def interrupt(moment: Progress) -> None:
        if moment.fetched_bytes > 100_000:
            raise KeyboardInterrupt

    run = Run(hub, tmp_path)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.go(watch=interrupt)
    assert time.monotonic() - begin < 2.5
    hub.bytes_per_second = 0
    run.go()
    run.check()
    assert 0 < run.seen[-1].fetched_bytes <= sum(map(len, FILES.values())) - 50_000


def test_the_first_error_is_the_one_reported(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("short", "b.safetensors", at=1000))
    with pytest.raises(SwiftletError, match=r"b\.safetensors"):
        Run(hub, tmp_path).go()
