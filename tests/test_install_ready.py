"""Ready containers from a hub and from a mirror: copied whole, checked before, verified after, resumed in
between."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_checkpoint import make_container, put_hashes
from loopback_hub import Fault, LoopbackHub, folder_files
from swiftlet_repack.install import Installation, Outcome
from swiftlet_repack.outline import Outline, check_room
from swiftlet_repack.pace import Pace
from swiftlet_repack.patience import Patience
from swiftlet_repack.sources import Hub, Mirror, Source
from swiftlet_repack.transfer import Progress

from swiftlet_mlx.errors import (
    Cancelled,
    DiskFull,
    HashMismatch,
    InstallError,
    MissingPart,
    NotAContainer,
    NotResumable,
    OutputExists,
    SourceBroken,
    SourceChanged,
    SwiftletError,
    UnknownVersion,
    UnsafePath,
    WrongSize,
)
from swiftlet_mlx.qpack import open_container

HASTY = Patience(
    stall_seconds=2, connect_seconds=1, first_wait=0.005, longest_wait=0.02, give_up_seconds=0.2,
    first_contact_tries=3, wrong_answer_tries=3,
)  # fmt: skip
SMALL = Pace(streams=4, span_bytes=40_000, record_bytes=16_384, record_seconds=0.05)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = make_container(tmp_path / "made")
    (path / "README.md").write_text("not in the manifest")
    return path


def offer(hub: LoopbackHub, made: Path, way: str) -> Source:
    if way == "mirror":
        return Mirror(hub.mirror("made", folder_files(made)))
    hub.repo("Org/Made-qpack", folder_files(made))
    return Hub("Org/Made-qpack", endpoint=hub.endpoint)


def install(source: Source, output: Path, *, restart: bool = False, watch: Any = None) -> tuple[Outline, Outcome]:
    with Installation(source, output, restart=restart, patience=HASTY, pace=SMALL) as work:
        if watch is not None:
            watch = watch(work)
        outline = work.look()
        return outline, work.carry_out(watch)


def content(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def expected(made: Path) -> dict[str, bytes]:
    files = content(made)
    files.pop("README.md")
    return files


@pytest.mark.parametrize("way", ["hub", "mirror"])
def test_a_ready_container_arrives_as_it_is(hub: LoopbackHub, made: Path, tmp_path: Path, way: str) -> None:
    outline, outcome = install(offer(hub, made, way), tmp_path / "out.qpack")
    got = content(tmp_path / "out.qpack")
    origin = json.loads(got.pop("source.json"))
    assert got == expected(made)
    assert outcome.output == tmp_path / "out.qpack"
    assert outline.ready
    assert outline.download_bytes == sum(map(len, expected(made).values()))
    assert outline.left_out == (("README.md",) if way == "hub" else ())
    assert set(origin["files"]) == set(expected(made))
    assert open_container(tmp_path / "out.qpack").layer_count == 2
    assert hub.body_bytes("README.md") == 0
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize("way", ["hub", "mirror"])
@pytest.mark.parametrize("seed", range(3))
def test_however_often_it_is_stopped_the_result_is_the_same(
    hub: LoopbackHub, made: Path, tmp_path: Path, way: str, seed: int
) -> None:
    rng = random.Random(seed)
    source = offer(hub, made, way)
    for _ in range(6):
        stop_at = rng.randrange(450_000)

        def watch(work: Installation, stop_at: int = stop_at) -> Any:
            def seen(moment: Progress) -> None:
                if moment.fetched_bytes >= stop_at // 4:
                    work.cancel.set()

            return seen

        hub.bytes_per_second = 3_000_000
        hub.faults[:] = [Fault("drop", "packed*", at=rng.randrange(30_000), times=2)]
        try:
            install(source, tmp_path / "out.qpack", watch=watch)
            break
        except Cancelled:
            assert not (tmp_path / "out.qpack").exists()
    else:
        hub.bytes_per_second = 0
        outline, _ = install(source, tmp_path / "out.qpack")
        assert outline.resumed
        assert outline.missing_bytes < outline.download_bytes
    got = content(tmp_path / "out.qpack")
    got.pop("source.json")
    assert got == expected(made)


def test_a_host_that_ignores_ranges_sends_each_file_once(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    source = offer(hub, made, "mirror")
    hub.faults.append(Fault("no_range"))
    with Installation(source, tmp_path / "out.qpack", patience=HASTY, pace=SMALL) as work:
        work.look()
        assert not work.fetcher.ranged
        hub.forget()
        work.carry_out()
    assert {k: v for k, v in content(tmp_path / "out.qpack").items() if k != "source.json"} == expected(made)
    large = [r.file for r in hub.requests if (r.file or "").startswith("packed_experts/layer_")]
    assert sorted(large) == ["packed_experts/layer_00.bin", "packed_experts/layer_01.bin"]


@pytest.mark.parametrize("way", ["hub", "mirror"])
def test_many_small_files_arrive_once_each_and_a_wrong_one_is_mended(
    hub: LoopbackHub, tmp_path: Path, way: str
) -> None:
    rng = random.Random(5)
    small = {f"extra/{n:02d}.txt": rng.randbytes(rng.randrange(3_000)) for n in range(30)}
    made = make_container(tmp_path / "made", hashes=False)
    (made / "extra").mkdir()
    for name, data in small.items():
        (made / name).write_bytes(data)
    manifest = json.loads((made / "manifest.json").read_bytes())
    manifest["files"].update({name: len(data) for name, data in small.items()})
    (made / "manifest.json").write_text(json.dumps(manifest))
    put_hashes(made)
    source = offer(hub, made, way)
    victim = max(small, key=lambda name: len(small[name]))
    hub.faults.append(Fault("corrupt", victim, at=len(small[victim]) - 1, times=1))
    _, outcome = install(source, tmp_path / "out.qpack")
    assert [(r.file, r.start) for r in outcome.repairs] == [(victim, len(small[victim]) - 1)]
    got = content(tmp_path / "out.qpack")
    got.pop("source.json")
    assert got == content(made)
    probes = 1 if way == "mirror" else 0
    for name, data in small.items():
        times = 2 if name == victim else 1
        assert hub.body_bytes(name) <= times * len(data) + probes


def test_swiftlets_containers_without_hashes_get_them(hub: LoopbackHub, tmp_path: Path) -> None:
    made = make_container(tmp_path / "made", hashes=False)
    install(offer(hub, made, "hub"), tmp_path / "out.qpack")
    got = json.loads((tmp_path / "out.qpack/hashes.json").read_bytes())
    put_hashes(made)
    assert got == json.loads((made / "hashes.json").read_bytes())


def test_a_container_of_swiftlets_installer_gets_its_tokenizer_though_the_manifest_is_silent(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    layers = {f"packed_experts/layer_{n:02d}.bin": 65_536 for n in range(2)}
    made = make_container(tmp_path / "made", extra={"files": {**layers, "model.safetensors": 4088}}, hashes=False)
    for name in ("chat_template.jinja", "evil.py", "notes.json"):
        (made / name).write_text("{{ x }}")
    outline, _ = install(offer(hub, made, "hub"), tmp_path / "out.qpack")
    got = set(content(tmp_path / "out.qpack"))
    assert {"tokenizer.json", "chat_template.jinja", "config.json", "hashes.json", *layers} <= got
    assert outline.left_out == ("evil.py", "notes.json")
    assert not got & {"evil.py", "notes.json"}


def test_looking_only_leaves_nothing_behind(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    with Installation(offer(hub, made, "hub"), tmp_path / "out.qpack", patience=HASTY) as work:
        outline = work.look()
    heads = ("manifest.json", "hashes.json", "config.json", "packed_experts/layout.json")
    assert outline.output_bytes == sum(map(len, expected(made).values()))
    assert outline.missing_bytes == outline.output_bytes - sum(len(expected(made)[name]) for name in heads)
    assert outline.dense_bytes == (made / "model.safetensors").stat().st_size
    assert outline.token_bytes == 2 * 2 * 3 * 32 * 32 * 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made"]
    assert hub.body_bytes("packed_experts/layer*") == 0


def test_an_output_that_exists_is_not_touched(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    there = make_container(tmp_path / "out.qpack", seed=3)
    before = content(there)
    with pytest.raises(OutputExists, match=r"out.qpack exists.*swiftlet-mlx remove"):
        install(offer(hub, made, "hub"), there)
    assert content(there) == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputExists, match=r"folder exists"):
        install(offer(hub, made, "hub"), tmp_path / "folder")
    (tmp_path / "mine.qpack.partial").mkdir()
    (tmp_path / "mine.qpack.partial" / "thesis.txt").write_text("x")
    with pytest.raises(OutputExists, match=r"did not begin"):
        install(offer(hub, made, "hub"), tmp_path / "mine.qpack")
    assert (tmp_path / "mine.qpack.partial" / "thesis.txt").exists()


def test_a_folder_that_cannot_be_written_is_said(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InstallError, match=r"file"):
        install(offer(hub, made, "hub"), tmp_path / "file" / "out.qpack")


def stopped_halfway(source: Source, hub: LoopbackHub, output: Path) -> None:
    hub.faults.append(Fault("status", "packed_experts/layer_01.bin", value=403, skip=1))
    with pytest.raises(SwiftletError):
        install(source, output)
    hub.faults.clear()
    assert output.with_name(output.name + ".partial").is_dir()


def test_a_restart_does_not_pull_the_folder_from_under_a_running_installation(
    hub: LoopbackHub, made: Path, tmp_path: Path
) -> None:
    source = offer(hub, made, "hub")
    with Installation(source, tmp_path / "out.qpack", patience=HASTY, pace=SMALL) as work:
        work.look()
        for restart in (True, False):
            with pytest.raises(NotResumable, match="another process"):
                install(source, tmp_path / "out.qpack", restart=restart)
        work.carry_out()
    assert open_container(tmp_path / "out.qpack")


def test_another_source_or_revision_in_the_same_place_is_refused_by_name(
    hub: LoopbackHub, made: Path, tmp_path: Path
) -> None:
    source = offer(hub, made, "hub")
    stopped_halfway(source, hub, tmp_path / "out.qpack")
    hub.repo("Org/Other", folder_files(made))
    with pytest.raises(NotResumable, match=r"source 'Org/Made-qpack'.*'Org/Other'.*--restart"):
        install(Hub("Org/Other", endpoint=hub.endpoint), tmp_path / "out.qpack")
    hub.repos["Org/Made-qpack"].push(folder_files(made), ref="v2")
    with pytest.raises(NotResumable, match=r"revision None.*'v2'"):
        install(Hub("Org/Made-qpack", endpoint=hub.endpoint, revision="v2"), tmp_path / "out.qpack")
    install(Hub("Org/Other", endpoint=hub.endpoint), tmp_path / "out.qpack", restart=True)
    assert json.loads((tmp_path / "out.qpack/source.json").read_bytes())["source"] == "Org/Other"


def test_the_pinned_commit_is_finished_although_main_moved(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    source = offer(hub, made, "hub")
    stopped_halfway(source, hub, tmp_path / "out.qpack")
    other = make_container(tmp_path / "other", seed=9)
    hub.repos["Org/Made-qpack"].push(folder_files(other))
    install(Hub("org/made-QPACK", endpoint=hub.endpoint), tmp_path / "out.qpack")
    got = content(tmp_path / "out.qpack")
    got.pop("source.json")
    assert got == expected(made)


def test_a_mirror_that_changed_in_between_is_said_and_not_mixed(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    source = offer(hub, made, "mirror")
    stopped_halfway(source, hub, tmp_path / "out.qpack")
    hub.mirror("made", folder_files(make_container(tmp_path / "other", seed=9)))
    with pytest.raises(SourceChanged, match=r"was replaced.*--restart"):
        install(source, tmp_path / "out.qpack")


@pytest.mark.parametrize("way", ["hub", "mirror"])
def test_a_wrong_byte_on_the_way_is_mended_and_reported(hub: LoopbackHub, made: Path, tmp_path: Path, way: str) -> None:
    hub.faults.append(Fault("corrupt", "packed_experts/layer_01.bin", at=50_123, times=1))
    _, outcome = install(offer(hub, made, way), tmp_path / "out.qpack")
    assert [(r.file, r.start, r.stop) for r in outcome.repairs] == [("packed_experts/layer_01.bin", 50_123, 50_124)]
    got = content(tmp_path / "out.qpack")
    got.pop("source.json")
    assert got == expected(made)


def test_a_damaged_source_never_gets_the_final_name(hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault("corrupt", "model.safetensors", at=9))
    with pytest.raises(HashMismatch, match=r"model.safetensors"):
        install(offer(hub, made, "hub"), tmp_path / "out.qpack")
    assert not (tmp_path / "out.qpack").exists()


def test_a_kill_right_after_the_name_was_given_leaves_a_whole_container(
    hub: LoopbackHub, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = offer(hub, made, "hub")
    with monkeypatch.context() as patch:
        patch.setattr("swiftlet_repack.staging.shutil.rmtree", lambda path, ignore_errors: None)
        install(source, tmp_path / "out.qpack")
    assert (tmp_path / "out.qpack" / ".install").is_dir()
    assert open_container(tmp_path / "out.qpack")
    with pytest.raises(OutputExists):
        install(source, tmp_path / "out.qpack")
    assert not (tmp_path / "out.qpack" / ".install").exists()


def test_no_room_is_said_before_anything_is_fetched(
    hub: LoopbackHub, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftlet_repack.install.free_bytes", lambda folder: 1000)
    with Installation(offer(hub, made, "hub"), tmp_path / "out.qpack", patience=HASTY) as work:
        outline = work.look()
    with pytest.raises(DiskFull, match=r"MB are needed.*are free"):
        check_room(outline)


# ---- containers that lie -------------------------------------------------------------------------


def lying(tmp_path: Path, **manifest: Any) -> Path:
    return make_container(tmp_path / "made", extra=manifest, hashes=False)


@pytest.mark.parametrize(
    ("manifest", "error", "words"),
    [
        ({"magic": "ZIP"}, NotAContainer, "ZIP"),
        ({"version": 7}, UnknownVersion, "7"),
        ({"files": {}}, SwiftletError, "no usable list"),
        ({"files": {"../../.bashrc": 1}}, UnsafePath, "bashrc"),
        ({"files": {".install/journal": 1}}, UnsafePath, "journal"),
        ({"files": {"CONFIG.json": 1}}, UnsafePath, "CONFIG.json"),
        ({"files": {"config.json/x": 1}}, UnsafePath, "file and a folder"),
        ({"files": {"Source.json": 1}}, UnsafePath, "beside 'source.json'"),
        ({"files": {"caf\u00e9.txt": 1, "cafe\u0301.txt": 1}}, UnsafePath, "beside"),
        ({"files": {"big.bin": 10**15}}, MissingPart, "big.bin is missing"),
        ({"files": {"config.json": 10**12}}, WrongSize, "config.json has"),
        ({"files": {"config.json": -1}}, SwiftletError, "-1"),
        ({"files": {"packed_experts/layer_00.bin": 16}}, WrongSize, "layer_00"),
    ],
)
def test_a_manifest_that_lies_is_refused_before_large_files(
    hub: LoopbackHub, tmp_path: Path, manifest: dict[str, Any], error: type[SwiftletError], words: str
) -> None:
    source = offer(hub, lying(tmp_path, **manifest), "hub")
    with pytest.raises(error, match=words):
        install(source, tmp_path / "out.qpack")
    assert hub.body_bytes("packed_experts/layer*") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made"]


@pytest.mark.parametrize("name", ["packed_experts/layer_01.bin", "model.safetensors", "tokenizer.json"])
def test_a_part_missing_at_the_source_is_named(hub: LoopbackHub, made: Path, tmp_path: Path, name: str) -> None:
    (made / name).unlink()
    source = offer(hub, made, "hub")
    with pytest.raises(MissingPart, match=name):
        install(source, tmp_path / "out.qpack")


def test_hashes_that_contradict_the_source_are_refused_before_large_files(
    hub: LoopbackHub, made: Path, tmp_path: Path
) -> None:
    layer = made / "packed_experts/layer_00.bin"
    layer.write_bytes(bytes(layer.stat().st_size))
    with pytest.raises(SourceBroken, match=r"layer_00.bin has the hash.*changed after it was made"):
        install(offer(hub, made, "hub"), tmp_path / "out.qpack")
    assert hub.body_bytes("packed_experts/layer*") == 0


def test_a_config_that_does_not_fit_the_layout_is_refused_before_large_files(
    hub: LoopbackHub, made: Path, tmp_path: Path
) -> None:
    config = json.loads((made / "config.json").read_bytes())
    (made / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    manifest = json.loads((made / "manifest.json").read_bytes())
    manifest["files"]["config.json"] = (made / "config.json").stat().st_size
    (made / "manifest.json").write_text(json.dumps(manifest))
    put_hashes(made)
    with pytest.raises(SwiftletError, match=r"3 layers"):
        install(offer(hub, made, "hub"), tmp_path / "out.qpack")
    assert hub.body_bytes("packed_experts/layer*") == 0
