"""A layer's table: laid out as Swiftlet does, read back as it was written, impossible in a bad state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftlet_mlx import layout
from swiftlet_mlx.errors import BadStride, SectionOutside
from swiftlet_mlx.layout import LayerTable, Section, make_table

widths = st.integers(1, 40)
parts = st.dictionaries(
    st.sampled_from(layout.SECTION_ORDER),
    st.tuples(st.sampled_from(["U32", "F32", "BF16", "U8"]), st.lists(widths, max_size=2).map(tuple)),
    min_size=1,
)


@settings(max_examples=40)
@given(st.dictionaries(st.integers(0, 5), st.tuples(st.integers(1, 9), parts), min_size=1), st.booleans())
def test_a_layout_reads_back_as_it_was_written(layers: dict[int, Any], alike: bool) -> None:
    if alike:
        layers = dict.fromkeys(range(3), next(iter(layers.values())))
    tables = {n: make_table(n, count, sections) for n, (count, sections) in layers.items()}
    count = max(tables) + 1
    flags = tuple(n % 2 == 0 for n in range(count))
    text = json.loads(layout.layout_json(tables, count, flags))
    assert text.get("version", 1) == layout.version_for(tables, count)
    assert layout.parse_layout(text, "here") == (tables, count, flags)


@settings(max_examples=40)
@given(parts, st.integers(1, 9))
def test_a_table_has_no_gaps_and_a_whole_number_of_pages(sections: Any, count: int) -> None:
    table = make_table(0, count, sections)
    at = 0
    for section in table.sections:
        assert section.offset == at
        at += section.size
    assert at == table.payload_bytes <= table.stride < at + layout.PAGE
    assert table.stride % layout.PAGE == 0


def test_version_1_order_is_swiftlets() -> None:
    names = [f"{p}.{part}" for p in ("down_proj", "up_proj", "gate_proj") for part in ("biases", "weight", "scales")]
    table = make_table(0, 2, dict.fromkeys(names, ("F32", (2, 2))))
    assert tuple(s.name for s in table.sections) == layout.V1_SECTIONS


def test_a_table_cannot_exist_in_a_bad_state() -> None:
    section = Section("fc1.weight", "F32", (2,), 0, 8)
    with pytest.raises(BadStride):
        LayerTable(0, 1, 100, (section,))
    with pytest.raises(SectionOutside):
        LayerTable(0, 1, layout.PAGE, (Section("fc1.weight", "F32", (2,), layout.PAGE, 8),))
