"""Every command that the README, the format page and the help show is run, as it stands there."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from tiny import make_checkpoint
from typer.main import get_command

from swiftlet_mlx.cli import run as cli
from swiftlet_mlx.cli.app import COMMANDS as listed
from swiftlet_mlx.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "repack/README.md"]
# Run by .ci/run, or by other tests: `make`, `pip` and `uv` set up an environment; a hub is needed for `--from-hf`
# (tests/test_install_cli.py runs it against one on loopback); `serve` does not end (tests/test_server*.py); `bench` and
# `doctor` take their time (tests/test_bench*.py, tests/test_doctor.py).
ELSEWHERE = re.compile(
    r"^(make|pip|uv) |--from-hf|--from-url|mlx-community/|swiftlet-mlx (serve|bench|doctor)|-m swiftlet_bench"
)


def shown(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`(mlx_lm\.[a-z_]+ --[^`]*|swiftlet-mlx [a-z]+ [^`]*)`", text)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in [*lines, *inline] if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which CHECKPOINT is a checkpoint with a tokenizer, and MODEL.qpack is made from it."""
    place = tmp_path_factory.mktemp("commands")
    make_checkpoint(place / "CHECKPOINT", kind="qwen3_5_moe", bits=4, tokenizer=True)
    assert cli.run(app, ["repack", "--source", f"{place}/CHECKPOINT", "--output", f"{place}/MODEL.qpack"]) == 0
    return place


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run a command line in `place`, our own in this process (starting one takes a second), others as they are."""

    def run(command: str) -> str:
        words = shlex.split(command)
        monkeypatch.chdir(place)
        if words[0] == "swiftlet-mlx":
            monkeypatch.setattr(sys, "stdin", io.StringIO())
            assert cli.run(app, words[1:]) == 0, capfd.readouterr().err
            return capfd.readouterr().out
        if words[0].startswith("mlx_lm."):
            words = [sys.executable, "-m", "mlx_lm", words[0].removeprefix("mlx_lm."), *words[1:]]
        done = subprocess.run(words, input="", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.long
@pytest.mark.parametrize("command", sorted({c for page in PAGES for c in shown(page) if not ELSEWHERE.search(c)}))
def test_a_command_of_the_pages_runs(command: str, run: Callable[[str], str]) -> None:
    fresh = {"MODEL.qpack": "ANEW.qpack", "NAME.qpack": "NAME.qpack"}
    if " repack " in command:
        for name, other in fresh.items():
            command = command.replace(f"--output {name}", f"--output {other}")
    elif "NAME.qpack" in command:
        command = command.replace("NAME.qpack", "MODEL.qpack")
    command = re.sub(r"\bMODEL(?=$| )", "MODEL.qpack", command)
    if " --prompt Hello" in command:
        command += " --max-tokens 4"
    run(command)


@pytest.mark.long
def test_the_python_of_the_readme_runs(place: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        done = subprocess.run([sys.executable, "-c", block], cwd=place, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def test_verbose_says_how_memory_is_divided(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", f"{place}/MODEL.qpack", "--prompt", "Hello", "--max-tokens", "1", "--cache-gb", "0.001"]
    assert cli.run(app, command) == 0
    assert "dense weights" not in capfd.readouterr().err
    assert cli.run(app, [*command, "--verbose"]) == 0
    said = capfd.readouterr()
    lines = dict(line.rsplit("  ", 1) for line in said.err.splitlines() if re.search(r"  +[\d.]+ [kMG]B$", line))
    assert {name.strip() for name in lines} >= {"dense weights", "expert slots", "this process at most"}
    assert "dense weights" not in said.out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example_of_that_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(app, [name, "--help"]) == 0
    shown = capsys.readouterr().out
    last = shown.strip().splitlines()[-1]
    assert last.strip().startswith(f"Example: swiftlet-mlx {name}"), "in one line, to be copied"
    assert not re.search(r"^ +-.*<[a-z ]+>", shown, re.MULTILINE), "values are named for what they are, not for types"


def test_no_command_s_summary_is_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(app, ["--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def numbers() -> list[tuple[str, str]]:
    """Every option that takes a number with a point."""
    found = []
    for name, command, _ in listed:
        for hint in get_type_hints(command, include_extras=True).values():
            if get_origin(hint) is Annotated and float in (hint.__origin__, *get_args(hint.__origin__)):
                found.append((name, hint.__metadata__[0].default))  # typer takes the first name for it
    return found


@pytest.mark.parametrize(("name", "option"), numbers())
def test_no_number_may_be_endless(name: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = {"generate": ["demo", "--prompt", "x"], "info": ["demo"], "oracle": ["demo", "--source", "demo"]}
    assert cli.run(app, [name, *needed.get(name, []), option, "inf"]) == 2
    assert f"{option} " in capsys.readouterr().err


def test_every_command_is_in_the_readme_or_the_bench_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"swiftlet-mlx {name}" not in text] == []


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--version"], 0),
        (["generate", "demo"], 2),
        (["generate", "demo", "--prompt", "x", "--ids", "1"], 2),
        (["generate", "demo", "--ids", "1,x"], 2),
        (["generate", "demo", "--prompt", "x", "--temp", "-1"], 2),
        (["generate", "demo", "--prompt", "x", "--cache-gb", "0"], 2),
        (["generate", "nonesuch", "--prompt", "x"], 1),
        (["info", "."], 1),
        (["nonesuch"], 2),
        (["repack", "--output", "x"], 2),
        (["generate", "demo", "--prompt", ""], 2),
        (["generate", "", "--prompt", "x"], 1),
        (["generate", "/no/such/folder", "--prompt", "x"], 1),
        (["chat", "demo", "hi", "--temp", "9"], 2),
        (["chat", "demo", "hi", "--max-tokens", "many"], 2),
        (["serve", "demo", "--port", "0", "--temp", "9"], 2),
        (["remove", "demo"], 2),
    ],
)
def test_wrong_usage_has_its_exit_code_and_a_message(
    args: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(app, args) == code
    assert (capfd.readouterr().err == "") == (code == 0)


def test_commands_for_containers_and_models_say_what_a_folder_is_instead(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = [
        (["verify", f"{place}/CHECKPOINT"], 2, "is a checkpoint"),
        (["info", f"{place}"], 1, "is no model"),
        (["remove", "demo"], 2, "comes with the package"),
        (
            ["oracle", f"{place}/MODEL.qpack", "--source", f"{place}/CHECKPOINT", "--ids", "1,99999"],
            2,
            "token id 99999",
        ),
        (["bench", "demo", "--prompt-tokens", "99999"], 2, "holds 4096 tokens"),
        (["bench", "demo", "--plot", f"{place}/none/x.png"], 2, ""),
    ]
    for command, code, said in cases:
        assert cli.run(app, command) == code
        assert said in capfd.readouterr().err


def test_a_place_that_takes_no_results_is_told_before_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # for root can write anywhere
    assert cli.run(app, ["bench", "demo", "--csv", str(tmp_path / "new" / "x.csv")]) == 2
    assert f"{tmp_path} cannot be written to" in capfd.readouterr().err


@pytest.mark.long
def test_a_process_ends_with_the_code_and_without_a_traceback(tmp_path: Path) -> None:
    too_long = "word " * 5000  # transformers warns of it before the command refuses it
    for args, code in ((["generate", "demo", "--prompt", too_long, "--quiet"], 1), (["nonesuch"], 2)):
        command = [sys.executable, "-m", "swiftlet_mlx", *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert done.stderr.startswith("swiftlet-mlx: ")
        assert done.stderr.count("\n") == 1, "no traceback, no warning of a library"
