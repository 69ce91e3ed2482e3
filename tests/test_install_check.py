"""`verify` against a source: the source's hashes, the container's bytes, and almost nothing over the
network."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_checkpoint import make_checkpoint, make_container, put_hashes
from loopback_hub import LoopbackHub, folder_files
from swiftlet_repack.check import check_against
from swiftlet_repack.fetch import Fetcher
from swiftlet_repack.sources import Hub, Mirror, Source
from swiftlet_repack.write import repack_checkpoint

from swiftlet_mlx.errors import HashMismatch


@pytest.fixture
def repacked(hub: LoopbackHub, tmp_path: Path) -> Path:
    made = make_checkpoint(tmp_path / "Model", shards=3, vision=True, mtp=True)
    hub.repo("Org/Model", folder_files(made))
    return repack_checkpoint(made, tmp_path / "out.qpack")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def check(path: Path, source: Source) -> int:
    return check_against(path, source, Fetcher(source)).fetched_bytes


def test_a_local_repack_is_recognised_as_the_hubs_checkpoint(hub: LoopbackHub, repacked: Path) -> None:
    fetched = check(repacked, Hub("Org/Model", endpoint=hub.endpoint))
    total = sum(f.stat().st_size for f in (repacked.parent / "Model").glob("*.safetensors"))
    assert 0 < fetched < total / 2  # headers and vision tensors only


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("packed_experts/layer_01.bin", r"1 of \d+ files of Org/Model.*model-0000\d-of"),
        ("model.safetensors", r"1 of \d+ files of Org/Model.*model-0000\d-of"),
        ("mtp.safetensors", r"1 of \d+ files of Org/Model.*model-00003-of"),
        ("tokenizer.json", r"tokenizer.json"),
    ],
)
def test_one_wrong_byte_names_the_source_file_it_came_from(
    hub: LoopbackHub, repacked: Path, name: str, words: str
) -> None:
    flip(repacked / name, 5 if "layer" in name else -3)
    with pytest.raises(HashMismatch, match=words):
        check(repacked, Hub("Org/Model", endpoint=hub.endpoint))


def test_another_checkpoint_of_the_same_shape_is_not_this_one(hub: LoopbackHub, repacked: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "Other", shards=3, vision=True, mtp=True, seed=8)
    hub.repo("Org/Other", folder_files(other))
    with pytest.raises(HashMismatch, match=r"3 of \d+ files of Org/Other"):
        check(repacked, Hub("Org/Other", endpoint=hub.endpoint))
    hub.repo("Org/Wider", folder_files(make_checkpoint(tmp_path / "Wider", experts=6)))
    with pytest.raises(HashMismatch, match="made from something else"):
        check(repacked, Hub("Org/Wider", endpoint=hub.endpoint))


@pytest.mark.parametrize("way", ["hub", "mirror"])
def test_a_ready_container_is_checked_file_by_file(hub: LoopbackHub, tmp_path: Path, way: str) -> None:
    made = make_container(tmp_path / "made")
    put_hashes(made)
    source: Source = Mirror(hub.mirror("made", folder_files(made)))
    if way == "hub":
        hub.repo("Org/Made", folder_files(made))
        source = Hub("Org/Made", endpoint=hub.endpoint)
    copy = make_container(tmp_path / "copy")
    assert check(copy, source) == 0
    assert hub.body_bytes("packed_experts/layer*") <= 2  # one byte each, to learn a mirror's sizes
    flip(copy / "packed_experts/layer_00.bin", 5)
    with pytest.raises(HashMismatch, match=r"1 of \d+ files.*layer_00.bin"):
        check(copy, source)
