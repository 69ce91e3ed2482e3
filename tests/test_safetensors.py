"""A safetensors header is believed only when it is consistent; every lie is refused quickly, by file and tensor."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftlet_mlx.errors import SafetensorsError
from swiftlet_mlx.safetensors import DTYPE_BYTES, build_header, parse_header, read_header, tensor_bytes

F32_16 = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}


def write(path: Path, table: Any, data: bytes = bytes(64)) -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def changed(**fields: Any) -> dict[str, Any]:
    return {"model.norm.weight": {**F32_16, **fields}}


LIES: dict[str, Any] = {
    "a shape larger than its bytes": changed(shape=[1000, 1000]),
    "a negative start": changed(data_offsets=[-64, 0]),
    "a reversed range": changed(data_offsets=[64, 0]),
    "one offset": changed(data_offsets=[64]),
    "offsets that are no numbers": changed(data_offsets=["0", "64"]),
    "offsets that are fractions": changed(data_offsets=[0.0, 64.0]),
    "truth for a number": changed(shape=[True, 16]),
    "a negative shape": changed(shape=[-16]),
    "a shape that overflows 64 bits": changed(shape=[1 << 33, 1 << 31]),
    "a shape that overflows to the right size": changed(shape=[1 << 62, 4, 16]),
    "no shape": changed(shape=None),
    "a shape of a thousand axes": changed(shape=[1] * 1000),
    "an unknown dtype": changed(dtype="F4"),
    "a dtype that is a list": changed(dtype=["F32"]),
    "an entry that is a list": {"model.norm.weight": []},
    "a range past the end": changed(shape=[32], data_offsets=[0, 128]),
    "bytes that nothing owns": changed(shape=[8], data_offsets=[0, 32]),
    "a hole before the first": changed(shape=[8], data_offsets=[32, 64]),
    "an overlap": {"a": F32_16, "model.norm.weight": {**F32_16, "shape": [8], "data_offsets": [32, 64]}},
    "the same bytes twice": {"a": F32_16, "model.norm.weight": F32_16},
    "half a surrogate pair": {"model.norm.weight\ud800": F32_16},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_file_and_tensor(tmp_path: Path, lie: str) -> None:
    path = write(tmp_path / "model-00001.safetensors", LIES[lie])
    with pytest.raises(SafetensorsError, match=r"model-00001\.safetensors") as caught:
        read_header(path)
    assert "norm.weight" in str(caught.value) or lie == "bytes that nothing owns"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too few"),
        (b"\x08\0\0", "too few"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header claims 1152921504606846976"),
        (struct.pack("<Q", 0) + b"{}", "header claims 0"),
        (struct.pack("<Q", 200) + b"{}" + bytes(100), "header claims 200"),
        (struct.pack("<Q", 2) + b"[]", "is a list"),
        (struct.pack("<Q", 4) + b"null", "is a NoneType"),
        (struct.pack("<Q", 8) + b'{"a": {}', "not JSON"),
        (struct.pack("<Q", 8) + b'{"\xff\xfe":1}', "not JSON"),
        (struct.pack("<Q", 21) + b'{"__metadata__": [1]}', "__metadata__"),
        (b"<!DOCTYPE html><html><body>404</body></html>" + bytes(100), "web page"),
        (b"\n  <html>Sign in</html>" + bytes(100), "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", "git lfs pull"),
    ],
)
def test_what_is_no_safetensors_file_is_named_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorsError, match=r"model\.safetensors") as caught:
        read_header(path)
    assert words in str(caught.value)


def test_a_name_that_appears_twice_is_refused(tmp_path: Path) -> None:
    entry = json.dumps(F32_16)
    path = write(tmp_path / "m.safetensors", f'{{"a": {entry}, "a": {entry}}}'.encode())
    with pytest.raises(SafetensorsError, match="'a' appears twice"):
        read_header(path)


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SafetensorsError, match="not JSON"):
        read_header(write(tmp_path / "m.safetensors", b'{"a":' * 200_000))


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SafetensorsError, match="cannot be read"):
        read_header(tmp_path / "m.safetensors")
    with pytest.raises(SafetensorsError, match="cannot be read"):
        read_header(tmp_path)


def test_a_giant_length_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", (1 << 33) - 100))
        file.truncate(1 << 33)  # a hole: eight gigabytes that claim to be a header
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(SafetensorsError, match="header claims"):
        read_header(path)
    assert time.process_time() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


names = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
entries = st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 5), max_size=4).map(tuple))


@given(st.dictionaries(names, entries, max_size=8), st.booleans())
@settings(max_examples=50)
def test_a_header_reads_back_as_it_was_written(tensors: dict[str, Any], metadata: bool) -> None:
    given = {"format": "mlx"} if metadata else {}
    text = build_header([(name, *entry) for name, entry in tensors.items()], given)
    assert len(text) % 8 == 0, "data does not begin on an eight-byte boundary"
    data = sum(tensor_bytes(*entry) for entry in tensors.values())
    header = parse_header(text[8:], len(text) + data, "here")
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == tensors
    assert header.metadata == given
    assert sum(t.nbytes for t in header.tensors.values()) == data


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 65) | st.text(max_size=5) | st.sampled_from(sorted(DTYPE_BYTES)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["dtype", "shape", "data_offsets", "x"])


@given(st.dictionaries(st.text(max_size=3), st.dictionaries(keys, json_values) | json_values, max_size=3))
@settings(max_examples=60)
def test_any_json_is_a_consistent_header_or_refused(table: dict[str, Any]) -> None:
    text = json.dumps(table).encode()
    try:
        header = parse_header(text, 8 + len(text) + 64, "here")
    except SafetensorsError:
        return
    at = header.data_start
    for tensor in header.tensors.values():
        assert tensor.start == at
        assert tensor.nbytes == tensor_bytes(tensor.dtype, tensor.shape)
        at = tensor.stop
    assert at == header.file_bytes


@given(st.binary(max_size=80))
@settings(max_examples=60)
def test_any_bytes_are_a_header_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except SafetensorsError:
        return
    assert content[8:9] == b"{"


def test_mlx_reads_what_is_built(tmp_path: Path) -> None:
    import mlx.core as mx

    tensors = [("ä.weight", "F32", (2, 3)), ("empty", "U8", (0,)), ("scalar", "BF16", ()), ("b", "U32", (1,))]
    path = tmp_path / "m.safetensors"
    path.write_bytes(build_header(tensors, {"format": "mlx"}) + bytes(range(24)) + b"\x80\x3f" + bytes(4))
    loaded = cast("dict[str, mx.array]", mx.load(str(path)))
    assert {n: a.shape for n, a in loaded.items()} == {n: s for n, _, s in tensors}
    assert loaded["scalar"].item() == 1.0
