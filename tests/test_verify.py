"""`verify` finds a flipped bit wherever it is, and says which file, expert and offset."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from swiftlet_repack.verify import verify
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx.errors import ContainerError, HashMismatch, SafetensorsError, UnsafePath


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("verify")
    source = make_checkpoint(root / "source", kind="qwen3_5_moe", bits=4)
    return source, repack_checkpoint(source, root / "model.qpack")


@pytest.fixture
def container(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "model.qpack"))


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_whole_container_passes(pair: tuple[Path, Path]) -> None:
    found = verify(pair[1], pair[0])
    assert found.hashed_files == len([p for p in pair[1].rglob("*") if p.is_file()]) - 1
    assert found.compared_bytes > 0
    assert found.unhashed == ()


@pytest.mark.parametrize("name", ["packed_experts/layer_02.bin", "model.safetensors", "tokenizer.json", "config.json"])
def test_a_flipped_bit_is_found_by_hash(container: Path, name: str) -> None:
    if not (container / name).exists():
        name = "swiftlet_mlx_model.py"
    flip(container / name, (container / name).stat().st_size - 20)
    with pytest.raises((HashMismatch, ContainerError), match=name.split("/")[-1]):
        verify(container)


def test_a_flipped_bit_is_found_by_comparison_with_its_place(pair: tuple[Path, Path], container: Path) -> None:
    (container / "hashes.json").unlink()
    assert verify(container).hashed_files == 0
    flip(container / "packed_experts/layer_01.bin", 3 * 16384 + 5)
    with pytest.raises(
        HashMismatch, match=r"layer_01\.bin: expert 3, gate_proj\.weight differs from byte 5 on .*49157"
    ):
        verify(container, pair[0])
    flip(container / "packed_experts/layer_01.bin", 3 * 16384 + 5)
    flip(container / "model.safetensors", (container / "model.safetensors").stat().st_size - 1)
    with pytest.raises(HashMismatch, match=r"model\.safetensors: tensor .* differs from byte"):
        verify(container, pair[0])


def test_another_source_is_told_apart(container: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", kind="qwen3_5_moe", bits=4, seed=1)
    with pytest.raises(HashMismatch, match="differs"):
        verify(container, other)
    shape = make_checkpoint(tmp_path / "shape", kind="qwen3_5_moe", bits=8)
    with pytest.raises(HashMismatch, match="tables differ"):
        verify(container, shape)


def test_one_run_names_every_bad_file(container: Path) -> None:
    for name in ("packed_experts/layer_00.bin", "packed_experts/layer_03.bin", "model.safetensors"):
        flip(container / name, (container / name).stat().st_size - 20)
    with pytest.raises(HashMismatch) as caught:
        verify(container)
    assert all(name in str(caught.value) for name in ("layer_00.bin", "layer_03.bin", "model.safetensors"))


def test_without_hashes_the_dense_file_must_still_be_consistent(container: Path) -> None:
    (container / "hashes.json").unlink()
    flip(container / "model.safetensors", 3)  # the header's length
    with pytest.raises(SafetensorsError, match=r"model\.safetensors"):
        verify(container)


def test_dense_names_without_their_prefix_are_the_same_tensors(pair: tuple[Path, Path], container: Path) -> None:
    """As Swiftlet's installer writes them."""
    path = container / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].rstrip().replace(b'"language_model.', b'"')
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    (container / "hashes.json").unlink()
    manifest = json.loads((container / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = path.stat().st_size
    (container / "manifest.json").write_text(json.dumps(manifest))
    assert verify(container, pair[0]).compared_bytes == verify(*reversed(pair)).compared_bytes


def test_tensors_too_many_and_too_few_are_named(pair: tuple[Path, Path], container: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(pair[0], tmp_path / "source"))
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(
        data.replace(b"language_model.lm_head.scales", b"language_model.lm_heads.scale")
    )
    for index in source.glob("*.index.json"):
        index.unlink()
    with pytest.raises(HashMismatch, match=r"lacks tensor lm_heads\.scale; .* has tensor lm_head\.scales"):
        verify(container, source)


def test_progress_ends_where_it_was_going(pair: tuple[Path, Path]) -> None:
    seen: list[tuple[int, int, str]] = []
    verify(pair[1], pair[0], progress=lambda *step: seen.append(step))
    hashing = [step for step in seen if step[2] == "hashes"]
    comparing = [step for step in seen if step[2] != "hashes"]
    for steps in (hashing, comparing):
        assert steps[-1][0] == steps[-1][1]
        assert [step[0] for step in steps] == sorted(step[0] for step in steps)


def test_a_missing_hashed_file_is_named(container: Path) -> None:
    path = container / "hashes.json"
    hashes = json.loads(path.read_text())
    hashes["files"]["vocab.json"] = "0" * 64
    path.write_text(json.dumps(hashes))
    with pytest.raises(HashMismatch, match=r"vocab\.json is missing"):
        verify(container)


@pytest.mark.parametrize("files", [None, [], {"config.json": 5}, {"config.json": "abc"}])
def test_hashes_that_are_none_are_refused(container: Path, files: object) -> None:
    (container / "hashes.json").write_text(json.dumps({"files": files}))
    with pytest.raises(ContainerError, match="sha256"):
        verify(container)


def test_hashes_cannot_name_files_outside(container: Path) -> None:
    (container / "hashes.json").write_text(json.dumps({"files": {"../../etc/passwd": "0" * 64}}))
    with pytest.raises(UnsafePath):
        verify(container)
