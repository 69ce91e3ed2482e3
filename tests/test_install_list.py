"""`list` and `remove` as a person types them."""

from __future__ import annotations

import json

import pytest
from fake_checkpoint import make_container

from swiftlet_mlx.cli.app import app
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.library import models_folder


def command(*words: str) -> int:
    return run(app, words)


def test_list_says_what_to_do_when_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "no models" in err
    assert "repack --from-hf" in err


def test_list_shows_names_sizes_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    make_container(models_folder() / "Good.qpack", source="Org/Good")
    bad = make_container(models_folder() / "Bad.qpack")
    (bad / "model.safetensors").unlink()
    make_container(models_folder() / "Half.qpack.partial")
    assert command("list") == 0
    out, err = capsys.readouterr()
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert set(lines) == {"Good", "Bad", "Half"}
    assert "kB" in lines["Good"]
    assert "damaged" in lines["Bad"]
    assert "unfinished" in lines["Half"]
    assert "model.safetensors" in err
    assert command("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["source"] for row in rows}["Good"] == "Org/Good"


def test_remove_needs_a_yes_where_it_cannot_ask(capsys: pytest.CaptureFixture[str]) -> None:
    path = make_container(models_folder() / "Good.qpack")
    assert command("remove", "Good") == 2
    assert "--yes" in capsys.readouterr().err
    assert path.exists()
    assert command("remove", "good", "--yes") == 0
    assert "deleted Good" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_remove_asks_and_does_as_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, gone: bool
) -> None:
    path = make_container(models_folder() / "Good.qpack")
    monkeypatch.setattr("sys.stdin", _Terminal(answer))
    code = command("remove", "Good")
    assert code == (0 if gone else 1)
    assert ("nothing was deleted" in capsys.readouterr().err) != gone
    assert path.exists() != gone


class _Terminal:
    """A terminal on which one line is typed."""

    def __init__(self, text: str) -> None:
        self._lines = iter([text])

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return next(self._lines, "")


def test_remove_of_nothing_says_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("remove", "nothing", "--yes") == 1
    assert "swiftlet-mlx list" in capsys.readouterr().err
