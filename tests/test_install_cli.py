"""Installing as a person types it: the plan, the question, the progress, the way to continue, the model by
its name."""

from __future__ import annotations

import functools
import io
import json
import re
from pathlib import Path

import pytest
from fake_checkpoint import make_checkpoint, make_container
from loopback_hub import Fault, LoopbackHub, folder_files
from rich.console import Console
from swiftlet_repack.cli_install import _same_command
from swiftlet_repack.install import Installation
from swiftlet_repack.patience import Patience
from tiny import make_checkpoint as make_tiny

from swiftlet_mlx.cli import console
from swiftlet_mlx.cli.app import app
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.library import models_folder
from swiftlet_mlx.locate import find_model


@pytest.fixture
def hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("sys.argv", ["swiftlet-mlx", "repack", "--from-hf", "Org/Model", "--restart"])
    return hub


@pytest.fixture
def model(hub: LoopbackHub, tmp_path: Path) -> Path:
    made = make_checkpoint(tmp_path / "Model", shards=2, vision=True, mtp=True)
    hub.repo("Org/Model", folder_files(made))
    return made


def command(*words: object) -> int:
    return run(app, [str(word) for word in words])


def test_a_dry_run_shows_the_plan_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "x.qpack", "--dry-run") == 0
    err = capsys.readouterr().err
    for words in [
        r"source +Org/Model at commit [0-9a-f]{12}: an MLX checkpoint",
        r"download +\S+ [kM]B",
        rf"container +\S+ kB in {tmp_path}/x.qpack",
        r"disk +\S+ MB needed, \S+ GB free",
        r"to run +\S+ kB of dense weights",
        r"left out +2 vision tensors",
        r"warning +2 tensors for multi-token prediction are kept apart",
    ]:
        assert re.search(words, err), (words, err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Model"]
    assert command("repack", "--from-hf", "Org/Model", "--dry-run") == 0
    assert list(models_folder().iterdir()) == []


def test_without_an_output_it_goes_to_the_models_folder_and_answers_to_its_names(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("repack", "--from-hf", "org/model") == 0
    path = models_folder() / "model.qpack"
    assert f"installed and verified: {path}" in capsys.readouterr().err
    for name in ("model", "Model", "Org/Model", "org/model"):
        assert find_model(name) == path
    assert command("verify", "Org/Model", "--from-hf", "Org/Model") == 0
    assert "every hash fits" in capsys.readouterr().err
    assert command("verify", "model") == 0
    assert command("info", "model", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layers_with_experts"] == 2
    assert command("repack", "--from-hf", "Org/Model", "--output", path) == 1
    assert "is not overwritten" in capsys.readouterr().err


def test_without_a_terminal_progress_is_plain_lines(
    hub: LoopbackHub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftlet_repack.cli_install.PLAIN_SECONDS", 0.1)
    hub.bytes_per_second = 60_000
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "x.qpack") == 0
    err = capsys.readouterr().err
    assert re.search(r"^\S+ [kM]?B of \S+ kB, \S+ [kM]?B/s, \d+:\d\d left: model-0000\d-of-00002", err, re.MULTILINE)
    assert "\x1b" not in err
    assert "\r" not in err


def test_quiet_says_only_that_it_is_done(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "x.qpack", "--quiet") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2


def test_a_terminal_gets_a_bar_and_a_question(
    hub: LoopbackHub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=screen, force_terminal=True, width=120, highlight=False))
    monkeypatch.setattr("sys.stdin", _Typed("n\n"))
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "x.qpack") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Model"]
    monkeypatch.setattr("sys.stdin", _Typed("\n"))
    hub.bytes_per_second = 200_000
    hub.faults.append(Fault("drop", "model-00001*", "cdn", skip=2, times=1, at=5_000))
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "x.qpack") == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "model-0000" in text, text
    assert "1 retries" in text, text
    assert re.search(r"\d+(\.\d+)?/\d+(\.\d+)? kB", text)


def test_yes_asks_nothing_of_whoever_sits_at_the_terminal(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=screen, force_terminal=True, width=120, highlight=False))
    monkeypatch.setattr("sys.stdin", _Typed("n\n"))
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "x.qpack", "--yes") == 0
    assert "Go on?" not in screen.getvalue()


@pytest.mark.parametrize("dry", [True, False])
def test_too_little_room_where_the_container_is_to_be_stops_before_the_download(
    hub: LoopbackHub,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dry: bool,
) -> None:
    monkeypatch.setattr(
        "swiftlet_repack.install.free_bytes", lambda folder: 1000 if folder == tmp_path / "far" else 10**12
    )
    (tmp_path / "far").mkdir()
    options = ["--dry-run"] if dry else []
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "far/x.qpack", *options) == 1
    err = capsys.readouterr().err
    assert re.search(r"far: .* are needed there, 1(\.0+)? k?B", err), err
    assert "download" in err  # the plan comes first
    assert hub.body_bytes("*.safetensors") < 20_000
    assert list((tmp_path / "far").iterdir()) == []


class _Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_fails_half_way_says_the_command_that_continues(
    hub: LoopbackHub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = functools.partial(Installation, patience=Patience(first_wait=0.01))
    monkeypatch.setattr("swiftlet_repack.cli_install.Installation", hasty)
    hub.faults.append(Fault("status", "model-00002*", "cdn", value=404, skip=2))
    output = tmp_path / "x.qpack"
    assert command("repack", "--from-hf", "Org/Model", "--output", output, "--yes") == 1
    err = capsys.readouterr().err
    assert "to continue: swiftlet-mlx repack --from-hf Org/Model\n" in err  # --restart would not continue
    assert err.count("Traceback") == 0
    hub.faults.clear()
    assert command("repack", "--from-hf", "Org/Model", "--output", output) == 0
    assert "are here already" in capsys.readouterr().err


def test_the_command_that_continues_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--from-url", "https://me:s3cret@host/m?sig=s3cret", "--output", "a b?c=d"]
    for argv in (words, ["--from-url=https://me:s3cret@host/m", *words[2:]]):
        monkeypatch.setattr("sys.argv", ["swiftlet-mlx", "repack", *argv])
        said = _same_command()
        assert "s3cret" not in said
        assert "https://me:***@host/m" in said
        assert "'a b?c=d'" in said


def test_a_repair_is_reported(hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repo("Org/Model", folder_files(make_container(tmp_path / "Model")))
    hub.faults.append(Fault("corrupt", "model.safetensors", at=777, times=1))
    assert command("repack", "--from-hf", "Org/Model", "--output", tmp_path / "x.qpack") == 0
    assert "warning: model.safetensors: bytes 777-777 had arrived wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from-hf", "Org/Model", "--from-url", "http://x/y"], "name one source"),
        (["--from-url", "http://x/y", "--revision", "v1"], "--revision belongs to --from-hf"),
        (["--from-hf", "nonsense"], "ORG/NAME"),
        (["--from-url", "nonsense"], "https://"),
    ],
)
def test_wrong_use_is_two_and_says_which_option(
    hub: LoopbackHub, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("repack", *words) == 2
    assert said in capsys.readouterr().err
    assert hub.requests == []


def test_an_unknown_model_is_one_message(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("repack", "--from-hf", "Org/Nothing") == 1
    err = capsys.readouterr().err
    assert "no such model" in err
    assert len(err.splitlines()) == 1
    assert command("generate", "Org/Nothing", "--prompt", "x") == 1
    assert "swiftlet-mlx repack --from-hf Org/Nothing" in capsys.readouterr().err


def test_a_model_from_the_hub_answers_like_the_folder_it_came_from(
    hub: LoopbackHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    made = make_tiny(tmp_path / "Model", "qwen3_moe", bits=4, shards=2)
    capsys.readouterr()
    hub.repo("Org/Model", folder_files(made))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def answer(name: object) -> list[int]:
        assert command("generate", name, "--ids", "1,5,9", "--max-tokens", 8, "--temp", 0, "--json") == 0
        ids: list[int] = json.loads(capsys.readouterr().out)["ids"]
        return ids

    expected = answer(made)
    snapshot_download("Org/Model", cache_dir=tmp_path / "cache")
    assert find_model("org/model").is_relative_to(tmp_path / "cache")
    assert answer("Org/Model") == expected
    assert command("repack", "--from-hf", "Org/Model") == 0
    assert find_model("org/model") == models_folder() / "Model.qpack"
    assert answer("Org/Model") == expected
