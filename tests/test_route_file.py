"""Recorded routes come back as they went, and a damaged file says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlet_mlx.errors import FormatError
from swiftlet_mlx.route_file import RouteFile, RouteInfo, read_routes

INFO = RouteInfo("model", (0, 1, 3), 8, 2, 1000)
ROUTES = st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 999), max_size=9)), max_size=20)


@given(ROUTES)
def test_routes_come_back(tmp_path_factory: pytest.TempPathFactory, routes: list[tuple[int, list[int]]]) -> None:
    path = tmp_path_factory.getbasetemp() / "routes"
    with RouteFile(path, INFO) as file:
        for route in routes:
            file(*route)
    assert read_routes(path) == (INFO, routes)


def test_a_file_cut_off_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    with RouteFile(path, INFO) as file:
        file(0, [1, 2])
        file(1, [3, 456])
    path.write_bytes(path.read_bytes()[:-2])
    assert read_routes(path)[1] == [(0, [1, 2])]


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "0 1 2\n", '{"format": "something else"}\n'])
def test_another_file_is_refused_with_what_makes_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "routes").write_text(text)
    with pytest.raises(FormatError, match="--record-routes"):
        read_routes(tmp_path / "routes")


def test_a_line_that_is_no_route_is_named(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    with RouteFile(path, INFO) as file:
        file(0, [1, 2])
    path.write_text(path.read_text() + "0 one\n")
    with pytest.raises(FormatError, match="line 3"):
        read_routes(path)
