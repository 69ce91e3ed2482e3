"""Headers of safetensors files: read, bounded and checked before anything believes them.

Knows bytes and JSON only: no tensors, no folders, no mlx. Invariant: a `Header` that exists describes tensors that
lie inside the file, do not overlap, leave no hole, and have exactly the size their dtype and shape give.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from .errors import SafetensorsError

# Bytes an element. Sub-byte types exist in the format (F4, F6) but nothing MLX writes uses them.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_RANK = 16
PREFIX_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `start` and `stop` are byte offsets counted from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. `tensors` is ordered by offset; `data_start` is where tensor bytes begin."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Size in bytes of a tensor with this safetensors dtype tag and shape.

    Raises:
        SafetensorsError: for a dtype tag that is not in the format or has no whole bytes.
    """
    try:
        return DTYPE_BYTES[dtype] * math.prod(shape)
    except KeyError:
        raise SafetensorsError(f"unknown dtype {dtype!r}; known are {', '.join(sorted(DTYPE_BYTES))}") from None


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Length of the JSON header that the first eight bytes announce.

    Args:
        prefix: The first bytes of the file, at least eight unless the file is shorter.
        file_bytes: Size of the whole file.
        where: File name for messages.

    Raises:
        SafetensorsError: for a file that is too short, a web page, a Git LFS pointer, or a length out of bounds.
    """
    lead = prefix[:64].lstrip().lower()
    if lead.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise SafetensorsError(
            f"{where}: this is a web page, not a safetensors file. The download was answered with an error page; "
            "fetch the file again"
        )
    if lead.startswith(b"version https://git-lfs"):
        raise SafetensorsError(
            f"{where}: this is a Git LFS pointer, not the file itself. Run `git lfs pull` in its folder"
        )
    if len(prefix) < PREFIX_BYTES or file_bytes < PREFIX_BYTES:
        raise SafetensorsError(f"{where}: {file_bytes} bytes are too few for a safetensors file; fetch it again")
    (length,) = struct.unpack("<Q", prefix[:PREFIX_BYTES])
    limit = min(MAX_HEADER_BYTES, file_bytes - PREFIX_BYTES)
    if not 2 <= length <= limit:
        raise SafetensorsError(
            f"{where}: the header claims {length} bytes, between 2 and {limit} are possible; "
            "the file is damaged or cut short, fetch it again"
        )
    return int(length)


def parse_header(header: bytes, file_bytes: int, where: str) -> Header:
    """Check a JSON header (without its eight length bytes) against the size of its file.

    Args:
        header: Exactly the bytes that `header_length` announced.
        file_bytes: Size of the whole file.
        where: File name for messages.

    Raises:
        SafetensorsError: naming file and tensor for anything that is not consistent.
    """
    try:
        table = json.loads(header, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"{where}: the header is not JSON ({error}); fetch the file again") from None
    if not isinstance(table, dict):
        raise SafetensorsError(f"{where}: the header is a {type(table).__name__}, an object was expected")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise SafetensorsError(f"{where}: __metadata__ is a {type(metadata).__name__}, an object was expected")
    data_start = PREFIX_BYTES + len(header)
    infos = [_tensor(name, entry, data_start, file_bytes, where) for name, entry in table.items()]
    infos.sort(key=lambda t: (t.start, t.stop))
    at = data_start
    for info in infos:
        if info.start != at:
            what = "overlaps the tensor before it" if info.start < at else f"leaves {info.start - at} bytes unused"
            raise SafetensorsError(f"{where}: tensor {info.name!r} at byte {info.start} {what}; fetch the file again")
        at = info.stop
    if at != file_bytes:
        raise SafetensorsError(
            f"{where}: tensors end at byte {at} but the file has {file_bytes}; the file is damaged, fetch it again"
        )
    return Header({t.name: t for t in infos}, {str(k): str(v) for k, v in metadata.items()}, data_start, file_bytes)


def read_header(path: Path) -> Header:
    """Read and check the header of one file; tensor bytes are not touched.

    Raises:
        SafetensorsError: if the file cannot be opened or its header is not consistent.
    """
    try:
        with open(path, "rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(64)
            length = header_length(prefix, file_bytes, path.name)
            file.seek(PREFIX_BYTES)
            header = file.read(length)
    except OSError as error:
        raise SafetensorsError(f"{path}: cannot be read ({error.strerror})") from None
    if len(header) != length:
        raise SafetensorsError(f"{path.name}: header ends after {len(header)} of {length} bytes")
    return parse_header(header, file_bytes, path.name)


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """Eight length bytes and the JSON header for tensors stored in the given order, padded so that data is aligned.

    Args:
        tensors: (name, dtype tag, shape) in file order.
        metadata: Optional string pairs for `__metadata__`.

    Returns:
        The bytes that precede the first tensor's bytes.
    """
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        size = tensor_bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise SafetensorsError(f"{where}: {twice!r} appears twice in the header")
    return table


def _tensor(name: str, entry: Any, data_start: int, file_bytes: int, where: str) -> TensorInfo:
    def refuse(why: str) -> SafetensorsError:
        return SafetensorsError(f"{where}: tensor {name!r}: {why}; the file is damaged, fetch it again")

    if not isinstance(entry, dict):
        raise refuse("its entry is not an object")
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise refuse("its name is not text")  # JSON can spell half a surrogate pair, UTF-8 cannot
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise refuse(f"unknown dtype {dtype!r}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise refuse(f"impossible shape {shape!r}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise refuse(f"impossible offsets {offsets!r}")
    start, stop = data_start + offsets[0], data_start + offsets[1]
    if not start <= stop <= file_bytes:
        raise refuse(f"bytes {start} to {stop} are not inside the file of {file_bytes}")
    need = tensor_bytes(dtype, shape)  # Python integers do not overflow
    if stop - start != need:
        raise refuse(f"{dtype} {list(shape)} needs {need} bytes, {stop - start} are given")
    return TensorInfo(name, dtype, tuple(shape), start, stop)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
