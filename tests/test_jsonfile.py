"""A JSON file is an object of bounded size, or an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftlet_mlx.errors import ConfigError, ContainerError, MissingPart
from swiftlet_mlx.jsonfile import object_if_there, read_object, to_json


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(to_json({"b": 1, "a": [True, None]}))
    assert read_object(tmp_path / "a.json", ConfigError) == {"a": [True, None], "b": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not valid JSON"), ("{", "not valid JSON"), ("[1]", "no JSON object but list"), ("null", "NoneType"),
     ('{"a":' * 100_000, "not valid JSON"), ("\xff\xfe", "cannot be read"), (" " * 40 + "{}", "larger than 32 bytes")],
)  # fmt: skip
def test_what_cannot_be_used_is_an_error_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=words) as caught:
        object_if_there(path, ConfigError, advice="do this", limit=32 if "32" in words else 10**6)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith("; do this")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        object_if_there(tmp_path, ConfigError)


@pytest.mark.parametrize("name", ["a.json", "file/a.json"])
def test_a_missing_file_is_not_a_broken_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert object_if_there(tmp_path / name, ContainerError) is None
    with pytest.raises(MissingPart, match="not found"):
        read_object(tmp_path / name, ContainerError, missing=MissingPart)
    with pytest.raises(ContainerError, match="not found"):
        read_object(tmp_path / name, ContainerError)
