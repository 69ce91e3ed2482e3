"""Every way a container can lie has its own error; what is consistent opens, from whoever wrote it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx.errors import (
    BadStride,
    ConfigMismatch,
    ContainerError,
    MissingPart,
    NotAContainer,
    SectionOutside,
    SectionOverlap,
    SectionSize,
    UnknownVersion,
    UnsafePath,
    WrongSize,
)
from swiftlet_mlx.loader import load_streamed
from swiftlet_mlx.qpack import LAYOUT, MANIFEST, open_container, safe_relative

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("qpack")
    return repack_checkpoint(make_checkpoint(root / "source", bits=4), root / "model.qpack")


@pytest.fixture
def container(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model.qpack"))


def edit(container: Path, name: str, change: Edit) -> None:
    path = container / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def set_section(index: int, **values: Any) -> Edit:
    return lambda layout: layout["sections"][index].update(values)


LIES: list[tuple[str, str, Edit, type[ContainerError], str]] = [
    ("wrong magic", MANIFEST, lambda m: m.update(magic="QPACX"), NotAContainer, "QPACX"),
    ("no magic", MANIFEST, lambda m: m.pop("magic"), NotAContainer, "None"),
    ("unknown version", MANIFEST, lambda m: m.update(version=3), UnknownVersion, "version 3"),
    ("version as text", MANIFEST, lambda m: m.update(version="1"), UnknownVersion, "'1'"),
    ("versions differ", LAYOUT, lambda v: v.update(version=2), UnknownVersion, "layout version 2"),
    ("a file that is not there", MANIFEST, lambda m: m["files"].update({"vocab.json": 5}), MissingPart, "vocab.json"),
    ("a size one off", MANIFEST, lambda m: m["files"].update({"config.json": 1}), WrongSize, "config.json"),
    ("a layer size", MANIFEST, lambda m: m["files"].update({"packed_experts/layer_01.bin": 9}), WrongSize, "layer_01"),
    ("no files", MANIFEST, lambda m: m.update(files={}), ContainerError, "list of files"),
    ("a negative size", MANIFEST, lambda m: m["files"].update({"config.json": -1}), ContainerError, "-1"),
    ("a path upwards", MANIFEST, lambda m: m["files"].update({"../x": 1}), UnsafePath, "../x"),
    ("an absolute path", MANIFEST, lambda m: m["files"].update({"/etc/passwd": 1}), UnsafePath, "/etc/passwd"),
    ("a section outside", LAYOUT, set_section(8, offset=16384 - 1), SectionOutside, "down_proj.biases"),
    ("a section far outside", LAYOUT, set_section(0, offset=1 << 60), SectionOutside, "gate_proj.weight"),
    ("an overlap", LAYOUT, set_section(1, offset=8), SectionOverlap, "gate_proj"),
    ("a crooked stride", LAYOUT, lambda v: v.update(expertStride=16385), BadStride, "16385"),
    ("no stride", LAYOUT, lambda v: v.update(expertStride=0), BadStride, "0"),
    ("a size that dtype and shape do not give", LAYOUT, set_section(0, size=4), SectionSize, "gate_proj.weight"),
    ("a dtype of another size", LAYOUT, set_section(0, dtype="U8"), SectionSize, "gate_proj.weight"),
    ("an unknown dtype", LAYOUT, set_section(0, dtype="F4"), SectionSize, "F4"),
    ("an empty section", LAYOUT, set_section(0, shape=[0, 8], size=0), SectionSize, "0 bytes"),
    ("an overflowing shape", LAYOUT, set_section(0, shape=[1 << 33, 1 << 31]), SectionSize, "gate_proj.weight"),
    ("a negative shape", LAYOUT, set_section(0, shape=[-1, 8]), ContainerError, "-1"),
    ("an unknown section", LAYOUT, set_section(0, name="gate_proj.zeros"), ContainerError, "gate_proj.zeros"),
    ("a section twice", LAYOUT, set_section(1, name="gate_proj.weight"), ContainerError, "twice"),
    ("no sections", LAYOUT, lambda v: v.update(sections=[]), ContainerError, "no sections"),
    ("another expert count", LAYOUT, lambda v: v.update(expertCount=7), WrongSize, "7 experts"),
    ("no experts", LAYOUT, lambda v: v.update(expertCount=0), ContainerError, "expertCount"),
    ("too few flags", LAYOUT, lambda v: v.update(linearLayers=[True]), ContainerError, "linearLayers"),
    ("a giant layer count", LAYOUT, lambda v: v.update(layerCount=10**9), ContainerError, "layerCount"),
    ("other layers in config", "config.json", lambda c: c.update(num_hidden_layers=5), ContainerError, "config.json"),
]


@pytest.mark.parametrize(("name", "change", "error", "words"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_lie_has_its_error(container: Path, name: str, change: Edit, error: type[ContainerError], words: str) -> None:
    edit(container, name, change)
    with pytest.raises(error) as caught:
        open_container(container)
    assert words in str(caught.value)
    assert str(container) in str(caught.value)


def test_counts_that_disagree_with_the_config(container: Path) -> None:
    size = (container / "config.json").stat().st_size
    edit(container, "config.json", lambda c: c.update(num_experts=16))
    edit(container, MANIFEST, lambda m: m["files"].update({"config.json": (container / "config.json").stat().st_size}))
    assert size
    with pytest.raises(ConfigMismatch, match="16 experts"):
        open_container(container)


@pytest.mark.parametrize("cut", [1, 16384, 10**9])
def test_a_truncated_layer_looks_like_an_interrupted_copy(container: Path, cut: int) -> None:
    path = container / "packed_experts/layer_02.bin"
    with open(path, "r+b") as file:
        file.truncate(max(0, path.stat().st_size - cut))
    with pytest.raises(WrongSize, match=r"parts are whole: .*layer_02\.bin has .* interrupted copy") as caught:
        open_container(container)
    assert "swiftlet-mlx repack" in str(caught.value)


@pytest.mark.parametrize("name", [MANIFEST, LAYOUT, "config.json", "model.safetensors", "packed_experts/layer_00.bin"])
def test_a_missing_part_is_named(container: Path, name: str) -> None:
    (container / name).unlink()
    with pytest.raises(ContainerError, match=name.split("/")[-1]):
        open_container(container)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a":' * 100_000, "\xff\xfe"])
@pytest.mark.parametrize("name", [MANIFEST, LAYOUT])
def test_json_that_is_none_is_refused(container: Path, name: str, text: str) -> None:
    (container / name).write_text(text, encoding="latin-1")
    with pytest.raises(ContainerError):
        open_container(container)


# ---- what others wrote -------------------------------------------------------------------------------------------


def as_swiftlet_repacker(container: Path) -> None:
    """Swiftlet's local repacker: no hashes, the dense file's header unpadded, no model file."""
    (container / "hashes.json").unlink()
    _unpad(container, strip="")
    edit(container, MANIFEST, lambda m: m.update(files=_sizes(container, ["config.json", LAYOUT])))


def as_swiftlet_installer(container: Path) -> None:
    """Swiftlet's installer: only dense and layer files are listed, names lose `language_model.`."""
    (container / "hashes.json").unlink()
    _unpad(container, strip="language_model.")
    edit(container, MANIFEST, lambda m: m.update(files=_sizes(container, [])))


def _sizes(container: Path, more: list[str]) -> dict[str, int]:
    names = ["model.safetensors", *(f"packed_experts/{p.name}" for p in container.glob("packed_experts/*.bin")), *more]
    return {name: (container / name).stat().st_size for name in names}


def _unpad(container: Path, strip: str) -> None:
    """Rewrite the dense file so that its data does not begin on an eight-byte boundary."""
    path = container / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = {k.removeprefix(strip): v for k, v in json.loads(data[8 : 8 + length]).items() if k != "__metadata__"}
    text = json.dumps(header).encode()
    text += b" " * ((3 - len(text)) % 8)
    assert (8 + len(text)) % 8
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize("writer", [as_swiftlet_repacker, as_swiftlet_installer])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_both_wild_kinds_of_version_1_load_and_answer_alike(
    tmp_path: Path, writer: Callable[[Path], None], kind: str
) -> None:
    import mlx.core as mx

    source = make_checkpoint(tmp_path / "source", kind=kind, bits=4)
    container = repack_checkpoint(source, tmp_path / "model.qpack")
    writer(container)
    ids = mx.array([[1, 2, 3, 4, 5]])
    expected = load_streamed(source)[0](ids)
    assert mx.array_equal(load_streamed(container)[0](ids), expected).item()


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a//b", "a/.", "C:/a", "a\\b", "a\nb", "a\0b", 5, None])
def test_unsafe_paths_are_refused(name: Any) -> None:
    with pytest.raises(UnsafePath):
        safe_relative(name, "here")
