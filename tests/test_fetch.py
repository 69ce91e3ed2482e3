"""Ranges over a bad line: what arrives is exactly what was asked for, or an error that says why."""

from __future__ import annotations

import contextlib
import email.utils
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loopback_hub import Fault, LoopbackHub
from swiftlet_repack.answers import check_linked, next_url
from swiftlet_repack.fetch import Fetcher
from swiftlet_repack.hub import Hub
from swiftlet_repack.mirror import Mirror
from swiftlet_repack.origin import RemoteFile
from swiftlet_repack.patience import Patience, Retry, Tries, TryAgain, retry_after

from swiftlet_mlx.errors import (
    AccessDenied,
    Cancelled,
    NetworkFailed,
    SourceBroken,
    SourceChanged,
    SwiftletError,
)

HASTY = Patience(
    stall_seconds=1.0, connect_seconds=2, first_wait=0.005, longest_wait=0.02, give_up_seconds=0.3,
    first_contact_tries=3, wrong_answer_tries=3,
)  # fmt: skip
DATA = random.Random(4).randbytes(700_001)
NAME = "model.safetensors"


@pytest.fixture
def hub(hub: LoopbackHub) -> LoopbackHub:
    hub.repo("Org/Model", {"config.json": b'{"a": 1}', NAME: DATA})
    return hub


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long bodies are read past the client here, as in earnest; short ones are not."""
    monkeypatch.setattr("swiftlet_repack.fetch.DIRECT_BYTES", 200_000)


def through_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftlet_repack.fetch.DIRECT_BYTES", 1 << 40)


class Line:
    """A fetcher on the loopback hub's repository, with what it reported."""

    def __init__(self, hub: LoopbackHub, *, token: str | None = None, patience: Patience = HASTY) -> None:
        self.retries: list[Retry] = []
        self.cancel = threading.Event()
        origin = Hub("Org/Model", endpoint=hub.endpoint, token=token)
        self.fetcher = Fetcher(origin, patience=patience, cancel=self.cancel, on_retry=self.retries.append)
        self.files = origin.listing(self.fetcher).files
        hub.forget()

    def read(self, start: int = 0, stop: int = len(DATA), name: str = NAME) -> bytes:
        return self.fetcher.read(self.files[name], start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, len(DATA)), (0, 1), (5, 6), (1000, 500_000), (700_000, 700_001)])
def test_a_range_is_exactly_those_bytes(hub: LoopbackHub, start: int, stop: int) -> None:
    line = Line(hub)
    assert line.read(start, stop) == DATA[start:stop]
    assert hub.body_bytes(NAME) == stop - start
    assert line.retries == []


def test_the_signed_address_is_resolved_once_for_many_ranges(hub: LoopbackHub) -> None:
    line = Line(hub)
    for start in range(0, 600_000, 100_000):
        line.read(start, start + 100_000)
    assert [r.where for r in hub.requests].count("hub") == 1
    assert [r.where for r in hub.requests].count("cdn") == 6


def test_the_token_goes_to_the_hub_and_never_to_the_storage_host(hub: LoopbackHub) -> None:
    hub.repos["Org/Model"].private = True
    line = Line(hub, token=hub.token)
    line.read()
    assert {(r.where, r.authorized) for r in hub.requests} == {("hub", True), ("cdn", False)}


def test_short_ranges_share_a_connection_and_a_long_one_keeps_its_own(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import close_session

    line = Line(hub)
    close_session()
    for start in range(0, 500_000, 100_000):
        assert line.read(start, start + 100_000) == DATA[start : start + 100_000]
    assert hub.connections == 2  # the hub's and the storage host's
    for _ in range(2):
        assert line.read() == DATA
    assert hub.connections == 3  # the first long body took the connection that was there
    through_the_client(monkeypatch)
    for _ in range(3):
        assert line.read() == DATA
    assert hub.connections == 4


def test_a_long_body_comes_in_few_blocks(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftlet_repack.fetch.BLOCK_SECONDS", 10)
    line, blocks = Line(hub), list[tuple[int, int]]()
    for _ in range(2):
        line.fetcher.stream(line.files[NAME], 0, len(DATA), lambda at, block: blocks.append((at, len(block))))
        assert blocks == [(0, len(DATA))]
        blocks.clear()
        through_the_client(monkeypatch)


def test_what_a_slow_line_brings_is_handed_on_soon(hub: LoopbackHub) -> None:
    hub.bytes_per_second = 1_000_000
    line, blocks = Line(hub), list[int]()
    line.fetcher.stream(line.files[NAME], 0, 400_000, lambda at, block: blocks.append(len(block)))
    assert sum(blocks) == 400_000
    assert max(blocks) < 200_000


def test_an_encrypted_line_gives_the_same_bytes_and_a_wrong_certificate_is_named(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import close_session

    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -subj /CN=localhost -days 2"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *words.split(), *names], check=True, capture_output=True)
    address = hub.encrypt(key, certificate)
    hub.mirror("m", {"a.bin": DATA})
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    close_session()
    try:
        mirror = Mirror(f"{address}/mirror/m")
        fetcher = Fetcher(mirror, patience=HASTY)
        file = fetcher.probe("a.bin", mirror.address("a.bin"))
        assert file is not None
        for _ in range(2):
            hub.faults.append(Fault("close", "a.bin", at=300_000, times=1))
            assert fetcher.read(file, 0, len(DATA)) == DATA
            through_the_client(monkeypatch)
        monkeypatch.delenv("SSL_CERT_FILE")
        close_session()
        with pytest.raises(NetworkFailed, match="certificate cannot be verified"):
            fetcher.read(file, 0, 10)
    finally:
        monkeypatch.undo()
        close_session()


@pytest.mark.parametrize("way", ["direct", "client"])
@pytest.mark.parametrize("cut", [0, 1, 65_536, 300_000, 699_999])
@pytest.mark.parametrize("kind", ["drop", "close"])
def test_a_lost_connection_goes_on_where_it_stopped(
    hub: LoopbackHub, kind: str, cut: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "client":
        through_the_client(monkeypatch)
    hub.faults.append(Fault(kind, NAME, at=cut, times=1))
    line = Line(hub)
    assert line.read() == DATA
    ranges = [r.range for r in hub.requests if r.where == "cdn"]
    assert len(line.retries) == 1
    assert ranges[0] == "bytes=0-700000"
    assert ranges[1] is not None
    again = int(ranges[1].removeprefix("bytes=").split("-")[0])
    assert again <= cut
    assert again == cut or kind == "drop"  # a reset may lose what the system had not handed over yet
    assert hub.body_bytes(NAME) == cut + len(DATA) - again


def test_a_line_that_drops_every_time_still_finishes(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("drop", NAME, at=140_000))
    assert Line(hub).read() == DATA


@pytest.mark.parametrize("way", ["direct", "client"])
def test_a_silent_connection_is_given_up_and_continued(
    hub: LoopbackHub, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "client":
        through_the_client(monkeypatch)
    hub.faults.append(Fault("stall", NAME, at=200_000, value=3, times=1))
    line = Line(hub, patience=replace(HASTY, stall_seconds=0.3))
    begin = time.monotonic()
    assert line.read() == DATA
    assert time.monotonic() - begin < 2.5
    assert "no answer in time" in line.retries[0].reason


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 408])
@pytest.mark.parametrize("where", ["hub", "cdn"])
def test_a_busy_server_is_asked_again(hub: LoopbackHub, status: int, where: str) -> None:
    hub.faults.append(Fault("status", NAME, where, times=2, value=status))
    line = Line(hub)
    assert line.read() == DATA
    assert len(line.retries) == 2
    assert str(status) in line.retries[0].reason


def test_retry_after_is_obeyed_by_every_stream(hub: LoopbackHub) -> None:
    line = Line(hub)
    line.read(0, 10)
    hub.faults.append(Fault("status", NAME, "cdn", times=1, value=429, headers={"Retry-After": "1"}))
    first = threading.Thread(target=line.read, args=(0, 1000))
    begin = time.monotonic()
    first.start()
    while not line.retries:
        time.sleep(0.005)
    hub.faults.append(Fault("status", NAME, "cdn", times=1, value=503))
    line.read(1000, 2000)
    first.join()
    assert time.monotonic() - begin >= 0.9
    assert [r.seconds >= 0.8 for r in line.retries] == [True, True]


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"Retry-After": "7"}, 7, 8),
        ({"Retry-After": "soon"}, 0, 0.1),
        ({"RateLimit": '"resolvers";r=0;t=3'}, 3, 4),
        ({"RateLimit": '"resolvers";r=5;t=30'}, 0, 0.1),
    ],
)
def test_what_the_server_asks_for_is_what_is_waited(
    hub: LoopbackHub, headers: dict[str, str], low: float, high: float
) -> None:
    hub.faults.append(Fault("status", NAME, "hub", times=1, value=429, headers=headers))
    line = Line(hub)

    def read() -> None:
        with contextlib.suppress(Cancelled):
            line.read()

    reader = threading.Thread(target=read)
    reader.start()
    while not line.retries:
        time.sleep(0.005)
    line.cancel.set()
    reader.join()
    assert low <= line.retries[0].seconds <= high


def test_a_server_that_asks_for_hours_is_told_to_the_user(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("status", NAME, "hub", value=429, headers={"Retry-After": "7200"}))
    with pytest.raises(NetworkFailed, match=r"7200 seconds.*same command"):
        Line(hub).read()


def test_an_expired_address_is_renewed_without_waiting(hub: LoopbackHub) -> None:
    line = Line(hub)
    line.read(0, 1000)
    hub.expire_signatures()
    assert line.read(1000, 2000) == DATA[1000:2000]
    assert [r.seconds for r in line.retries] == [0.0]


def test_an_address_refused_again_and_again_is_an_error(hub: LoopbackHub) -> None:
    hub.signed_seconds = -1
    with pytest.raises(AccessDenied):
        Line(hub).read()


def test_a_server_that_ignores_ranges_still_gives_the_right_bytes(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("no_range", NAME, "cdn"))
    line = Line(hub)
    assert line.read(300_000, 300_100) == DATA[300_000:300_100]
    assert not line.fetcher.ranged


def test_a_file_that_ends_early_is_named_with_both_sizes(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("short", NAME, at=500_000))
    with pytest.raises(SourceBroken, match=r"model.safetensors.*500000 of 700001"):
        Line(hub).read()
    with pytest.raises(SourceBroken, match=r"500000 of 700001"):
        Line(hub).read(600_000, 600_001)  # answered with 416


def test_a_false_416_is_asked_again_then_reported(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("status", NAME, "cdn", value=416, times=1))
    line = Line(hub)
    assert line.read() == DATA
    hub.faults.append(Fault("status", NAME, "cdn", value=416))
    with pytest.raises(SourceBroken, match="refuses bytes"):
        line.read()


def test_a_login_page_once_is_survived_and_always_is_explained(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("html", NAME, times=1))
    line = Line(hub)
    assert line.read() == DATA
    hub.faults.append(Fault("html", NAME))
    with pytest.raises(SourceBroken, match="web page"):
        line.read()


def test_another_hash_on_the_redirect_means_the_source_changed(hub: LoopbackHub) -> None:
    line = Line(hub)
    hub.faults.append(Fault("etag", NAME, "hub"))
    with pytest.raises(SourceChanged, match=r"model.safetensors.*--restart"):
        line.read()


def test_another_object_behind_the_same_address_is_resolved_anew(hub: LoopbackHub) -> None:
    line = Line(hub)
    line.read(0, 10)
    hub.faults.append(Fault("etag", NAME, "cdn", times=1))
    assert line.read() == DATA
    assert "another object" in line.retries[0].reason


def test_a_file_replaced_on_a_mirror_is_never_mixed(hub: LoopbackHub) -> None:
    address = hub.mirror("m", {"a.bin": DATA})
    mirror = Mirror(address)
    fetcher = Fetcher(mirror, patience=HASTY)
    file = fetcher.probe("a.bin", mirror.address("a.bin"))
    assert file is not None
    assert fetcher.read(file, 0, 1000) == DATA[:1000]
    hub.mirror("m", {"a.bin": bytes(len(DATA))})
    got: list[bytes] = []
    with pytest.raises(SourceChanged, match="replaced"):
        fetcher.stream(file, 1000, 2000, lambda at, block: got.append(block))
    assert got == []


def test_no_network_is_said_soon_and_a_long_silence_later(hub: LoopbackHub) -> None:
    line = Line(hub)
    dead = RemoteFile(NAME, "http://127.0.0.1:9/x", 10)
    begin = time.monotonic()
    with pytest.raises(NetworkFailed, match="3 attempts"):
        Fetcher(Hub("Org/Model", endpoint=hub.endpoint), patience=HASTY).read(dead, 0, 10)
    assert time.monotonic() - begin < 1
    hub.faults.append(Fault("status", NAME, value=503))
    begin = time.monotonic()
    with pytest.raises(NetworkFailed, match=r"503.*same command"):
        line.read()
    assert time.monotonic() - begin > HASTY.give_up_seconds


def test_cancel_stops_a_wait_and_a_stream(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("status", NAME, value=503))
    line = Line(hub, patience=Patience(first_wait=30))
    threading.Timer(0.1, line.cancel.set).start()
    begin = time.monotonic()
    with pytest.raises(Cancelled):
        line.read()
    assert time.monotonic() - begin < 2


def test_an_error_of_the_sink_is_not_taken_for_the_network(hub: LoopbackHub) -> None:
    line = Line(hub)

    def full(at: int, block: bytes) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        line.fetcher.stream(line.files[NAME], 0, 1000, full)
    assert line.retries == []


def test_random_drops_at_random_places_give_the_same_bytes(hub: LoopbackHub) -> None:
    rng = random.Random(1)
    line = Line(hub)
    for _ in range(15):
        start = rng.randrange(len(DATA))
        stop = rng.randrange(start, len(DATA)) + 1
        hub.faults[:] = [
            Fault("drop", NAME, at=rng.randrange(stop - start + 1), times=rng.randrange(3)),
            Fault("status", NAME, value=rng.choice([429, 500, 503]), times=rng.randrange(2)),
        ]
        assert line.read(start, stop) == DATA[start:stop]


@pytest.mark.parametrize("bad", [(-1, 5), (5, 4), (0, len(DATA) + 1)])
def test_a_range_outside_the_file_is_refused_before_asking(hub: LoopbackHub, bad: tuple[int, int]) -> None:
    line = Line(hub)
    with pytest.raises(ValueError, match="bytes"):
        line.read(*bad)
    assert hub.requests == []


def test_offline_mode_is_respected(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkFailed, match="HF_HUB_OFFLINE"):
        line.read()
    with pytest.raises(SwiftletError, match="HF_HUB_OFFLINE"):
        Line(hub)
    assert hub.requests == []


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    from huggingface_hub import close_session

    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

    def set_proxy(address: str, around: str = "") -> None:
        monkeypatch.setenv("HTTP_PROXY", address)
        monkeypatch.setenv("NO_PROXY", around)
        close_session()

    yield set_proxy
    monkeypatch.undo()
    close_session()


def test_a_proxy_from_the_environment_is_used_and_gone_around_as_it_says(
    hub: LoopbackHub, proxied: Callable[..., None]
) -> None:
    """The hub's server stands in for a proxy: the hub's name leads nowhere but through it, the storage host's does not
    lead through it."""
    proxied(hub.endpoint, "localhost")
    origin = Hub("Org/Model", endpoint="http://hub.invalid", token="hf_loopback")
    fetcher = Fetcher(origin, patience=HASTY)
    files = origin.listing(fetcher).files
    assert fetcher.read(files[NAME], 0, len(DATA)) == DATA
    assert {(r.where, r.path.startswith("http://hub.invalid/")) for r in hub.requests} == {
        ("hub", True),
        ("cdn", False),
    }
    assert all(r.authorized == (r.where == "hub") for r in hub.requests)


def test_a_proxy_that_is_not_there_is_said(hub: LoopbackHub, proxied: Callable[..., None]) -> None:
    line = Line(hub)
    proxied("http://127.0.0.1:9")
    with pytest.raises(NetworkFailed):
        line.read()
    assert hub.requests == []


def test_a_date_to_come_back_at_is_taken_by_the_clock_of_who_says_it() -> None:
    later, date = "Tue, 01 Dec 2026 10:00:30 GMT", "Tue, 01 Dec 2026 10:00:00 GMT"
    assert retry_after({"Retry-After": later, "Date": date}) == 30  # this machine's clock may be days off
    assert retry_after({"Retry-After": date, "Date": later}) == 0
    assert retry_after({"Retry-After": "Tue, 99 Dec 2026"}) is None
    soon = email.utils.formatdate(time.time() + 40, usegmt=True)
    assert 30 < (retry_after({"Retry-After": soon}) or 0) <= 41


@pytest.mark.parametrize(
    "fault",
    [
        Fault("html", "a.bin"),
        Fault("status", "a.bin", value=403),
        Fault("status", "a.bin", value=404),
        Fault("status", "a.bin", value=500),
        Fault("status", "a.bin", value=302, headers={"Location": "?sig=s3cret"}),
    ],
    ids=lambda fault: f"{fault.kind} {fault.value}",
)
def test_nothing_secret_of_an_address_is_shown(hub: LoopbackHub, fault: Fault) -> None:
    """User, password, and a signature in the query."""
    url = hub.mirror("m", {"a.bin": DATA, "hashes.json": b"{}"}).replace("http://", "http://me:s3cret@") + "?sig=s3cret"
    mirror = Mirror(url)
    fetcher = Fetcher(mirror, patience=HASTY)
    file = fetcher.probe("a.bin", mirror.address("a.bin"))
    assert file is not None
    assert file.url.endswith("?sig=s3cret")
    hub.faults.append(replace(fault))
    with pytest.raises(SwiftletError, match=r"a\.bin") as caught:
        fetcher.read(file, 0, 9)
    assert "s3cret" not in str(caught.value)


def test_waits_double_up_to_a_limit_each_shortened_at_random() -> None:
    patience = Patience(first_wait=1.0, longest_wait=16.0)
    waits = []
    for _ in range(30):
        tries = Tries(patience)
        waits.append([tries.failed(TryAgain("busy"), NAME, 0, contact=True) for _ in range(8)])
    for n, column in enumerate(zip(*waits, strict=True)):
        longest = min(2.0**n, 16.0)
        assert longest / 2 <= min(column) < longest * 0.75 < max(column) <= longest


def test_a_redirect_that_gives_up_encryption_is_not_followed() -> None:
    with pytest.raises(SourceBroken, match="without encryption") as caught:
        next_url("f", "https://host/x?sig=s3cret", "http://host/y")
    assert "s3cret" not in str(caught.value)
    assert next_url("f", "https://host/a/x", "/y") == "https://host/y"
    assert next_url("f", "http://host/a/x", "https://cdn/y") == "https://cdn/y"


@pytest.mark.parametrize(("size", "error"), [("699", SourceBroken), ("134", SourceBroken), ("701", SourceChanged)])
def test_a_size_on_the_redirect_that_is_not_the_announced_one_stops_before_a_byte_comes(
    size: str, error: type[SwiftletError]
) -> None:
    file = RemoteFile("model.safetensors", "http://x", 700, sha256="0" * 64)
    check_linked(file, {"X-Linked-Size": "700", "X-Linked-Etag": f'"{"0" * 64}"'})
    with pytest.raises(error, match=rf"model.safetensors.*\b{size} "):
        check_linked(file, {"X-Linked-Size": size, "X-Linked-Etag": f'"{"0" * 64}"'})
