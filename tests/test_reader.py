"""Expert sources: every byte where it belongs, whatever the layout, in as few calls as the system takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from swiftlet_repack.write import repack_checkpoint
from tiny import make_checkpoint

from swiftlet_mlx import reader
from swiftlet_mlx.layout import PAGE, LayerTable, Section, make_table
from swiftlet_mlx.reader import CheckpointSource, ContainerSource, open_source

PARTS = {
    f"{p}_proj.{part}": (dtype, shape)
    for p in ("gate", "up", "down")
    for part, dtype, shape in (("weight", "U32", (8, 16)), ("scales", "BF16", (8, 4)), ("biases", "BF16", (8, 4)))
}


def make_source(folder: Path, table: LayerTable, **options: Any) -> tuple[ContainerSource, bytes]:
    """A container source over one layer file of random bytes, and those bytes."""
    data = np.random.default_rng(0).integers(0, 256, table.file_bytes, np.uint8).tobytes()
    path = folder / table.file_name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    container: Any = SimpleNamespace(path=folder, source="", layers={table.layer: table})
    return ContainerSource(container, **options), data


def buffers(table: LayerTable, n: int) -> list[list[bytearray]]:
    return [[bytearray(s.size) for s in table.sections] for _ in range(n)]


def views(rows: list[list[bytearray]]) -> list[list[memoryview]]:
    return [[memoryview(b) for b in row] for row in rows]


def check(table: LayerTable, data: bytes, first: int, rows: list[list[bytearray]]) -> None:
    for n, row in enumerate(rows):
        for section, got in zip(table.sections, row, strict=True):
            at = (first + n) * table.stride + section.offset
            assert bytes(got) == data[at : at + section.size], (first + n, section.name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(buffers, bytes) of every preadv."""
    seen: list[tuple[int, int]] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        seen.append((len(buffers), sum(map(len, buffers))))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    return seen


def shuffled(table: LayerTable) -> LayerTable:
    """The same sections in another order in the file, with gaps and padding between them."""
    at, sections = 64, []
    for s in sorted(table.sections, key=lambda s: s.name):
        sections.append(Section(s.name, s.dtype, s.shape, at, s.size))
        at += s.size + 48
    order = [s.name for s in table.sections]
    sections.sort(key=lambda s: order.index(s.name))
    return LayerTable(table.layer, table.expert_count, -(-at // PAGE) * PAGE, tuple(sections))


@pytest.mark.parametrize("layout", [lambda t: t, shuffled], ids=["plain", "shuffled with gaps"])
@pytest.mark.parametrize(("first", "n"), [(0, 1), (5, 1), (0, 6), (2, 3)])
def test_experts_and_runs_arrive_whole_in_one_call(
    tmp_path: Path, calls: list[Any], layout: Callable[[LayerTable], LayerTable], first: int, n: int
) -> None:
    table = layout(make_table(3, 6, PARTS))
    source, data = make_source(tmp_path, table)
    rows = buffers(table, n)
    assert source.read(3, first, views(rows)) == n * table.payload_bytes
    check(table, data, first, rows)
    assert len(calls) == 1
    source.close()


def test_a_run_of_more_buffers_than_one_call_takes_is_split(tmp_path: Path, calls: list[Any]) -> None:
    table = make_table(0, 150, PARTS)  # 9 sections and the padding: 1,500 buffers
    source, data = make_source(tmp_path, table)
    rows = buffers(table, 150)
    source.read(0, 0, views(rows))
    check(table, data, 0, rows)
    assert len(calls) == 2
    assert all(n <= reader.MAX_CALL_BUFFERS for n, _ in calls)
    source.close()


@pytest.mark.parametrize("cap", [1, 100, 1000, 4096])
def test_no_call_asks_for_more_bytes_than_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any], cap: int
) -> None:
    monkeypatch.setattr(reader, "MAX_CALL_BYTES", cap)
    table = shuffled(make_table(0, 3, {"fc1.weight": ("U8", (300,)), "fc2.weight": ("F32", (50, 3))}))
    source, data = make_source(tmp_path, table)
    rows = buffers(table, 1)
    source.read(0, 2, views(rows))
    check(table, data, 2, rows)
    assert max(size for _, size in calls) <= cap
    source.close()


@pytest.mark.parametrize("bits", [None, 4, "mixed"])
def test_container_and_checkpoint_sources_give_the_same_bytes(tmp_path: Path, bits: Any) -> None:
    folder = make_checkpoint(tmp_path / "model", bits=bits, shards=3)
    repack_checkpoint(folder, tmp_path / "model.qpack")
    plain, _ = open_source(folder)
    packed, _ = open_source(tmp_path / "model.qpack")
    assert isinstance(plain, CheckpointSource)
    assert isinstance(packed, ContainerSource)
    assert plain.tables.keys() == packed.tables.keys()
    for layer, table in plain.tables.items():
        for first, n in ((0, table.expert_count), (3, 1), (table.expert_count - 2, 2)):
            a, b = buffers(table, n), buffers(packed.tables[layer], n)
            assert plain.read(layer, first, views(a)) == packed.read(layer, first, views(b))
            names = [s.name for s in packed.tables[layer].sections]
            order = [names.index(s.name) for s in table.sections]
            assert a == [[row[i] for i in order] for row in b]
            assert any(any(part) for row in a for part in row), "all zero proves nothing"
    plain.close()
    packed.close()


def test_direct_reads_give_the_same_bytes_and_leave_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int, int]] = []
    if hasattr(os, "posix_fadvise"):
        advise = os.posix_fadvise
        monkeypatch.setattr(os, "posix_fadvise", lambda fd, *a: (advised.append(a), advise(fd, *a)))
    table = make_table(0, 4, PARTS)
    source, data = make_source(tmp_path, table, io="direct")
    rows = buffers(table, 2)
    source.read(0, 1, views(rows))
    check(table, data, 1, rows)
    if hasattr(os, "posix_fadvise"):
        assert advised == [(table.stride, table.stride + table.payload_bytes, os.POSIX_FADV_DONTNEED)]
    source.close()
