"""Repositories and mirrors as origins: what is listed is pinned and hashed, and every refusal says what to
do."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest
from loopback_hub import Fault, LoopbackHub
from swiftlet_repack.fetch import Fetcher
from swiftlet_repack.hub import Hub, Listing
from swiftlet_repack.mirror import Mirror, parse_hashes
from swiftlet_repack.patience import Patience

from swiftlet_mlx.errors import (
    AccessDenied,
    NetworkFailed,
    OptionError,
    SourceBroken,
    SourceChanged,
    SourceNotFound,
    SwiftletError,
    UnsafePath,
)

HASTY = Patience(
    stall_seconds=1, connect_seconds=1, first_wait=0.005, longest_wait=0.02, give_up_seconds=0.2,
    first_contact_tries=3, wrong_answer_tries=3,
)  # fmt: skip
WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere/token")
    hub.repo("Org/Model", {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS})
    return hub


def listing(hub: LoopbackHub, repo: str = "Org/Model", commit: str | None = None, **options: str) -> Listing:
    origin = Hub(repo, endpoint=hub.endpoint, **options)
    return origin.listing(Fetcher(origin, patience=HASTY), commit=commit)


def test_a_listing_pins_the_commit_and_carries_sizes_and_hashes(hub: LoopbackHub) -> None:
    found = listing(hub)
    commit = hub.repos["Org/Model"].refs["main"]
    assert (found.source, found.commit) == ("Org/Model", commit)
    weights, config = found.files["model.safetensors"], found.files["config.json"]
    assert weights.size == len(WEIGHTS)
    assert weights.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert config.sha256 is None
    assert config.git_oid is not None
    assert all(f"/resolve/{commit}/" in file.url for file in found.files.values())


def test_a_hub_behind_a_path_of_another_host_is_asked_there_for_everything(hub: LoopbackHub) -> None:
    hub.below = "/gate/hf"
    origin = Hub("Org/Model", endpoint=hub.endpoint + "/gate/hf/")
    fetcher = Fetcher(origin, patience=HASTY)
    files = origin.listing(fetcher).files
    assert fetcher.read(files["config.json"], 0, 8) == b'{"a": 1}'
    assert fetcher.read(files["model.safetensors"], 5, 900) == WEIGHTS[5:900]


def test_a_hub_that_gives_no_hash_is_refused(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopback_hub._sibling", lambda path, stored, blobs: {"rfilename": path, "size": stored.size})
    with pytest.raises(SwiftletError, match=r"no hash for config.json.*HF_ENDPOINT"):
        listing(hub)


def test_a_pin_holds_although_the_branch_moves_on(hub: LoopbackHub) -> None:
    before = listing(hub)
    hub.repos["Org/Model"].push({"config.json": b"other"})
    again = listing(hub, commit=before.commit)
    assert again == before
    assert listing(hub).commit != before.commit


def test_a_pin_that_is_gone_says_that_the_source_changed(hub: LoopbackHub) -> None:
    with pytest.raises(SourceChanged, match="--restart"):
        listing(hub, commit="b" * 40)


def test_a_revision_can_be_asked_for_by_name_or_commit(hub: LoopbackHub) -> None:
    commit = hub.repos["Org/Model"].push({"config.json": b"x"}, ref="v2/beta")
    assert listing(hub, revision="v2/beta").commit == commit
    assert listing(hub, revision=commit).commit == commit
    with pytest.raises(SourceNotFound, match=r"no revision 'v3'"):
        listing(hub, revision="v3")


def test_another_letter_case_finds_the_same_model(hub: LoopbackHub) -> None:
    assert listing(hub, "org/MODEL").source == "Org/Model"


def test_where_letter_case_matters_the_right_one_is_named(hub: LoopbackHub) -> None:
    hub.exact_names = True
    with pytest.raises(SourceNotFound, match="did you mean Org/Model"):
        listing(hub, "org/model")


def test_a_missing_model_says_what_it_may_be(hub: LoopbackHub) -> None:
    with pytest.raises(SourceNotFound, match=r"no such model.*or it is private.*hf auth login"):
        listing(hub, "Org/Nothing")
    with pytest.raises(SourceNotFound, match=r"no such model.*token may not see it"):
        listing(hub, "Org/Nothing", token=hub.token)


def test_a_private_model_opens_with_the_token_only(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["Org/Model"].private = True
    with pytest.raises(SourceNotFound, match="HF_TOKEN"):
        listing(hub)
    assert listing(hub, token=hub.token).source == "Org/Model"
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert listing(hub).source == "Org/Model"


def test_a_token_that_is_not_valid_is_called_that(hub: LoopbackHub) -> None:
    with pytest.raises(AccessDenied, match=r"does not accept the token.*hf auth login"):
        listing(hub, token="hf_wrong")


def test_a_gated_model_lists_but_its_files_ask_for_access(hub: LoopbackHub) -> None:
    hub.repos["Org/Model"].gated = True
    for token, opens in [(None, False), ("hf_other", False), (hub.token, True)]:
        origin = Hub("Org/Model", endpoint=hub.endpoint, token=token)
        fetcher = Fetcher(origin, patience=HASTY)
        file = origin.listing(fetcher).files["config.json"]
        if opens:
            assert fetcher.read(file, 0, file.size) == b'{"a": 1}'
        else:
            with pytest.raises(AccessDenied, match=rf"gated.*{hub.endpoint}/Org/Model.*hf auth login"):
                fetcher.read(file, 0, file.size)


def test_a_busy_hub_is_asked_again_and_a_dead_one_reported(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("status", where="api", value=503, times=2))
    assert listing(hub).source == "Org/Model"
    hub.faults[:] = [Fault("status", where="api", value=503)]
    with pytest.raises(NetworkFailed, match="503"):
        listing(hub)
    origin = Hub("Org/Model", endpoint="http://127.0.0.1:9")
    with pytest.raises(NetworkFailed, match=r"127.0.0.1:9 cannot be reached"):
        origin.listing(Fetcher(origin, patience=HASTY))


def test_a_web_page_instead_of_the_hub_is_recognised(hub: LoopbackHub) -> None:
    hub.faults.append(Fault("html", where="api"))
    with pytest.raises(SourceBroken, match="HF_ENDPOINT"):
        listing(hub)


@pytest.mark.parametrize("name", ["model", "a/b/c", "../x", "a/", "/etc/passwd", "a b/c"])
def test_a_name_that_cannot_be_one_is_refused_without_asking(hub: LoopbackHub, name: str) -> None:
    with pytest.raises(OptionError, match="ORG/NAME"):
        listing(hub, name)
    assert hub.requests == []


def test_a_file_name_that_leaves_the_folder_is_refused(hub: LoopbackHub) -> None:
    hub.repo("Org/Trap", {"../../.ssh/config": b"x", "config.json": b"{}"})
    with pytest.raises(UnsafePath, match="ssh"):
        listing(hub, "Org/Trap")


# ---- mirrors -------------------------------------------------------------------------------------


def sums(files: dict[str, bytes]) -> bytes:
    return json.dumps({"files": {k: hashlib.sha256(v).hexdigest() for k, v in files.items()}}).encode()


FILES = {"manifest.json": b'{"magic": "QPACK"}', "packed experts/layer_00.bin": WEIGHTS}


def mirrored(url: str, patience: Patience = HASTY) -> Listing:
    mirror = Mirror(url)
    return mirror.listing(Fetcher(mirror, patience=patience))


def test_a_mirror_lists_what_its_hashes_name(hub: LoopbackHub) -> None:
    url = hub.mirror("m", {**FILES, "stray.bin": b"x", "hashes.json": sums(FILES)})
    found = mirrored(url)
    assert set(found.files) == {*FILES, "hashes.json"}
    layer = found.files["packed experts/layer_00.bin"]
    assert (layer.size, layer.sha256) == (len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    assert layer.etag
    assert found.commit is None
    fetcher = Fetcher(Mirror(url), patience=HASTY)
    assert fetcher.read(layer, 10, 90) == WEIGHTS[10:90]


def test_a_mirror_without_hashes_or_with_a_missing_file_is_refused(hub: LoopbackHub) -> None:
    with pytest.raises(SourceNotFound, match=r"no hashes.json"):
        mirrored(hub.mirror("m", FILES))
    with pytest.raises(SourceNotFound, match=r"names gone.bin"):
        mirrored(hub.mirror("m", {**FILES, "hashes.json": sums({**FILES, "gone.bin": b"x"})}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"<html>", SourceBroken),
        (b"[]", SourceBroken),
        (b'{"files": {}}', SourceBroken),
        (b'{"files": {"a": "zz"}}', SourceBroken),
        (b'{"files": {"a": 5}}', SourceBroken),
        (b'{"files": {"../a": "' + b"0" * 64 + b'"}}', UnsafePath),
    ],
)
def test_hashes_that_are_none_are_refused(text: bytes, error: type[SwiftletError]) -> None:
    with pytest.raises(error):
        parse_hashes(text, "there")


def test_a_password_in_the_address_is_used_and_not_shown(hub: LoopbackHub) -> None:
    url = hub.mirror("m", {**FILES, "hashes.json": sums(FILES)}).replace("http://", "http://me:s%40cret@")
    mirror = Mirror(url)
    found = mirror.listing(Fetcher(mirror, patience=HASTY))
    assert all(request.authorized for request in hub.requests)
    assert "cret" not in repr((found, mirror.home, str(mirror.refusal(401, {}, "x"))))


def test_an_address_that_is_none_is_refused() -> None:
    for url in ["ftp://me:s3cret@host/x", "host/x", "https://", "file:///etc", "https://[::1/x"]:
        with pytest.raises(OptionError, match=r"https://|Invalid IPv6") as caught:
            Mirror(url)
        assert "s3cret" not in str(caught.value)


def test_a_mirror_that_hangs_can_be_cancelled(hub: LoopbackHub) -> None:
    url = hub.mirror("m", {"hashes.json": b"x"})
    hub.faults.append(Fault("status", value=503))
    mirror = Mirror(url)
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(SwiftletError, match="stopped"):
        mirror.listing(Fetcher(mirror, patience=Patience(), cancel=cancel))
