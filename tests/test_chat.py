"""The chat on its screen: what is typed, what is shown, what Ctrl-C does. A scripted model, real terminals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from talkers import Scripted, chat_template, tokenizer
from tiny import make_checkpoint

from swiftlet_mlx import sidecar
from swiftlet_mlx.cli import console as words
from swiftlet_mlx.cli.answer import Blocks, LiveAnswer, printable
from swiftlet_mlx.cli.app import app, run
from swiftlet_mlx.cli.chat import _ended_by_signals
from swiftlet_mlx.cli.lines import Lines
from swiftlet_mlx.cli.repl import Repl
from swiftlet_mlx.completion import Ask, Completions
from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import ReadFailed, SessionFileError
from swiftlet_mlx.events import Progress, TextDelta, ThinkingDelta
from swiftlet_mlx.session import Session

HERE = Path(__file__).parent
MARKDOWN = "# Title\n\nSome **bold** words.\n\n- one\n- two\n\n```python\nprint(1)\n\nprint(2)\n```\n\nEnd."


def environment(**values: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    return {**keep, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "TERM": "xterm-256color", **values}


# ---- in a terminal of its own ---------------------------------------------------------------------------------------


class Terminal:
    """A chat in a pseudo-terminal, and the screen that a person would see."""

    def __init__(self, folder: Path, columns: int = 80, env: dict[str, str] | None = None, **script: Any) -> None:
        (folder / "script.json").write_text(json.dumps(script))
        self.raw = io.StringIO()
        self.child = pexpect.spawn(
            sys.executable, [str(HERE / "chat_program.py"), str(folder / "script.json")],
            env=environment(**(env or {})), dimensions=(24, columns), encoding="utf-8", timeout=30,
        )  # fmt: skip
        self.child.logfile_read = self.raw
        self._columns = columns
        self.child.expect_exact("\n> ")

    def type(self, text: str, until: str = "\r\n> ") -> str:
        """Send a line, wait for the next prompt, return what was written meanwhile."""
        self.child.sendline(text)
        self.child.expect_exact(until)
        return str(self.child.before)

    def screen(self) -> list[str]:
        """All lines ever shown, as a terminal ends up showing them."""
        screen = pyte.HistoryScreen(self._columns, 24, history=10_000, ratio=1.0)
        pyte.Stream(screen).feed(self.raw.getvalue())
        past = ["".join(line[x].data for x in range(self._columns)).rstrip() for line in screen.history.top]
        return [*past, *(line.rstrip() for line in screen.display)]

    def end(self) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus) if self.child.exitstatus is not None else -int(self.child.signalstatus)


@pytest.mark.long
def test_an_evening_at_the_terminal(tmp_path: Path) -> None:
    """Markdown, an answer stopped, one taken up again, several lines at once, and the way out."""
    replies = [MARKDOWN, "word " * 400, "slow " * 40, "short", *["again"] * 9]
    terminal = Terminal(tmp_path, replies=replies, delay=0.003)
    terminal.type("Hi")
    shown = terminal.screen()
    assert any(re.fullmatch(r"\s+Title\s*", line) for line in shown)
    assert [line.strip() for line in shown if "print(" in line] == ["print(1)", "print(2)"], "each line once"
    assert "Some bold words." in shown
    assert any(re.search(r"\d+ tokens · [\d.]+ tok/s · first in [\d.]+ s · .*context \d+%", line) for line in shown)

    terminal.child.sendline("Tell me more")
    terminal.child.expect_exact("word word")
    terminal.child.sendintr()
    terminal.child.expect_exact("stopped; what was said so far is kept")
    terminal.child.expect_exact("\r\n> ")
    terminal.child.sendline("And now?")
    terminal.child.expect_exact("slow slow")
    terminal.child.send("typed\nahead\n")  # two messages: nobody pastes where there is no prompt
    terminal.child.expect_exact("short")
    terminal.child.expect_exact("again")
    terminal.child.expect_exact("\r\n> ")

    for lines in (['"""first', "second", 'third"""'], ["first\\", "second\\", "third"]):
        for line in lines[:-1]:
            terminal.child.sendline(line)
            terminal.child.expect_exact("… ")
        assert "again" in terminal.type(lines[-1])
    terminal.child.send("first\nsecond\n\n/exit\n\tthird")  # what a terminal sends of a paste
    assert "again" in terminal.type("")
    history = terminal.type("/history")
    assert history.count("first second third") == 2
    assert history.count("first second /exit third") == 1

    terminal.child.sendintr()
    terminal.child.expect_exact("Ctrl-C again leaves")
    terminal.child.sendintr()
    assert terminal.end() == 130


@pytest.mark.long
def test_a_narrow_terminal_without_colours_and_a_conversation_kept_when_killed(tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    options: dict[str, Any] = {"columns": 40, "env": {"NO_COLOR": "1"}, "session": str(file)}
    replies = [MARKDOWN + " And a rather long line that has to be wrapped.", "x" * 30 + "123456789 " * 90]
    terminal = Terminal(tmp_path, replies=replies, delay=0.002, **options)
    terminal.type("Hi")
    assert not re.search(r"\x1b\[(\d+;)*(3[0-8]|9[0-7]|4[0-8])[;m]", terminal.raw.getvalue()), "no colours"
    assert any("wrapped" in line for line in terminal.screen())
    assert any(re.fullmatch(r"(.* · )?context \d+%", line) for line in terminal.screen()), "no figure is cut"
    terminal.child.sendline("More")
    terminal.child.expect_exact("123456789 123456789 123456789")
    terminal.child.send("typed ahead")
    terminal.child.sendintr()
    terminal.child.expect_exact("\r\n> ")
    assert sum("xxx" in line for line in terminal.screen()) == 1, "neither keys nor Ctrl-C push the drawing aside"
    os.kill(terminal.child.pid, signal.SIGKILL)
    assert terminal.end() == -signal.SIGKILL
    unsaved = sidecar.read(file)
    assert unsaved is not None
    said = [m["content"] for m in unsaved.messages]
    assert said[::2] == ["Hi", "More"], "what was said before the kill"
    assert said[3].startswith("x" * 30), "and as much of a stopped answer as was shown"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_polite_kill_ends_the_conversation_as_leaving_does(talk: Talk, tmp_path: Path, name: str) -> None:
    class Killed(list[Any]):
        def pop(self, *place: Any) -> Any:
            if self[0] == "killed":
                os.kill(os.getpid(), getattr(signal, name))
            return super().pop(*place)

    with pytest.raises(SystemExit) as caught, _ended_by_signals():
        talk(Killed(["one", "killed"]), "a", autosave=tmp_path / "kept")
    assert caught.value.code == 128 + getattr(signal, name)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert "one" in read_metadata(tmp_path / "kept")


def read_metadata(file: Path) -> str:
    from swiftlet_mlx.safetensors import read_header

    return read_header(file).metadata["swiftlet_session"]


def test_the_command_itself_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model from disk, streamed; answers on stdout as they are, figures on stderr, no control characters."""
    model = make_checkpoint(tmp_path / "model", "qwen3_next", tokenizer=True)
    options = ["chat", str(model), "--max-tokens", "4", "--temp", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd?\n"))
    assert run(app, options) == 0
    by_lines = capsys.readouterr()
    assert by_lines.err.count("tok/s") == 2
    assert "hits" in by_lines.err
    assert "\x1b" not in by_lines.out + by_lines.err
    assert run(app, [*options, "Hi", "And?"]) == 0
    assert capsys.readouterr().out == by_lines.out != ""


# ---- without a terminal ---------------------------------------------------------------------------------------------


class Typed(Lines):
    """Lines from a list; a KeyboardInterrupt among them is raised."""

    def __init__(self, lines: list[Any]) -> None:
        self.interactive = True
        self.typed = lines
        self.drafts: list[str] = []

    def read(self, prompt: str = "> ", draft: str = "") -> str:
        if not self.typed:
            raise EOFError
        self.drafts.append(draft)
        line = self.typed.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    def close(self) -> None:
        pass


Talk = Callable[..., tuple[str, Repl]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Talk]:
    """Run a conversation of typed lines against replies, return all that was written."""
    engines: list[Engine] = []

    def run(
        lines: list[Any],
        *replies: str,
        opening: str = "none",
        context: int = 4096,
        on_step: Callable[[int], None] | None = None,
        **options: Any,
    ) -> tuple[str, Repl]:
        made = tokenizer(chat_template(opening))
        scripts = [made.encode(r, add_special_tokens=False) for r in replies or ("ok",)]
        model = Scripted(scripts, eos=made.convert_tokens_to_ids("<|im_end|>"), context=context, on_step=on_step)
        engines.append(Engine(lambda: (model, made)))
        file = io.StringIO()
        monkeypatch.setattr(words, "err", Console(file=file, width=100, highlight=False, soft_wrap=True))
        session = Session(Completions(engines[-1]), ask=Ask())
        repl = Repl(session, Console(file=file, width=100, highlight=False), Typed(lines), **options)
        try:
            repl.run()
        except KeyboardInterrupt:
            file.write("<left>")
        return file.getvalue(), repl

    yield run
    for engine in engines:
        engine.close()


def contents(repl: Repl) -> list[str]:
    return [m["content"] for m in repl.session.messages]


def test_help_names_every_command(talk: Talk) -> None:
    out, _ = talk(["/help"])
    for name in ("help", "reset", "undo", "retry", "edit", "save", "load", "system", "set", "stats", "exit", "file"):
        assert f"/{name}" in out


def test_undo_retry_and_reset(talk: Talk) -> None:
    out, repl = talk(["one", "two", "/retry", "/undo", "/history"], "a", "b", "c")
    assert contents(repl) == ["one", "a"]
    assert "dropped: two" in out
    _, repl = talk(["one", "/retry"], "a", "b")
    assert contents(repl) == ["one", "b"]
    out, repl = talk(["one", "/reset", "/undo"], "a")
    assert contents(repl) == []
    assert "Nothing has been asked" in out


def test_edit_offers_the_old_words_and_answers_the_new(talk: Talk) -> None:
    _, repl = talk(["one", "two", "/edit 1", "uno"], "a", "b", "c")
    assert contents(repl) == ["uno", "c"]
    lines = repl._lines
    assert isinstance(lines, Typed)
    assert lines.drafts[-1] == "one"
    _, repl = talk(["one", "/edit", KeyboardInterrupt], "a")
    assert contents(repl) == ["one", "a"]
    out, _ = talk(["one", "/edit 7"], "a")
    assert "from 1 to 1" in out


def test_the_system_prompt_can_be_set_and_removed(talk: Talk) -> None:
    out, repl = talk(["/system Be brief.", "one", "/system"], "a")
    assert contents(repl) == ["Be brief.", "one", "a"]
    assert out.count("system prompt: Be brief.") == 2
    _, repl = talk(["/system Be brief.", "/system -"])
    assert contents(repl) == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("temperature", "0.3", "0.3"), ("top_k", "7", "7"), ("seed", "5", "5"), ("max_tokens", "9", "9"),
     ("thinking", "off", "off"), ("thoughts", "show", "show"), ("max_tokens", "auto", "auto"),
     ("min_tokens", "6", "6"), ("sentence_end", "on", "on"), ("presence_penalty", "1.5", "1.5")],
)  # fmt: skip
def test_settings_can_be_changed_and_are_shown(talk: Talk, name: str, value: str, shown: str) -> None:
    out, _ = talk([f"/set {name} {value}", f"/set {name}", "/set"])
    assert out.count(f"  {name} {shown}\n") == 3


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("/set temperature 9", "temperature is 9.0"), ("/set temprature 1", "Did you mean temperature?"),
     ("/set top_k many", "not a whole number"), ("/set sed", "Did you mean seed?"),
     ("/set max_tokens 0", "max_tokens is 0"), ("/set thinking maybe", "one of on, off, auto"),
     ("/hlep", "Did you mean /help?"), ("/save", "takes one file name"), ("/load /no/such/file", "/no/such/file"),
     ("/save a b", "quotes"), ("/load 'x", "quotes"), ("/save ''", "quotes"), ("/file ''", "quotes"),
     ("/file /no/such/file", "cannot be read"), ("/file 'x", "quotes"), ("/file /dev/zero", "is no file"),
     ("/set min_tokens -1", "min_tokens is -1"), ("/set sentence_end 7", "one of on, off")],
)  # fmt: skip
def test_mistakes_are_explained_and_end_nothing(talk: Talk, line: str, complaint: str) -> None:
    out, repl = talk([line, "one"], "a")
    assert complaint in out
    assert contents(repl) == ["one", "a"]


def test_a_path_at_the_beginning_is_no_command(talk: Talk) -> None:
    _, repl = talk(["/usr/bin/env: what is it?"], "a")
    assert contents(repl)[0] == "/usr/bin/env: what is it?"


def test_a_file_goes_before_the_next_message(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "my notes.txt").write_text("line 1\n```\ncode\n```\n")
    _, repl = talk(
        [f"/file '{tmp_path}/my notes.txt'", "What is it?", f"/file '{tmp_path}/my notes.txt' And this?"], "a"
    )
    fenced = "my notes.txt:\n````\nline 1\n```\ncode\n```\n````\n\n"
    assert contents(repl)[::2] == [fenced + "What is it?", fenced + "And this?"]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "big").write_bytes(b"x" * 1_000_001)
    out, _ = talk([f"/file {tmp_path}/binary", f"/file {tmp_path}/big"])
    assert "is no UTF-8 text" in out
    assert "larger than" in out


def test_a_conversation_is_saved_and_loaded(talk: Talk, tmp_path: Path) -> None:
    out, _ = talk(["one", f"/save {tmp_path}/a", "/reset", f"/load {tmp_path}/a", "/history"], "a")
    assert f"saved to {tmp_path}/a" in out
    assert "1. one" in out


def test_the_conversation_s_own_file_is_written_at_the_end(talk: Talk, tmp_path: Path) -> None:
    talk(["one", "/exit", "never read"], "a", autosave=tmp_path / "kept")
    assert "one" in read_metadata(tmp_path / "kept")
    assert "never read" not in read_metadata(tmp_path / "kept")


def test_a_conversation_that_cannot_be_saved_says_where_its_words_are(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[write] Unable to write 17585 bytes to file.")

    monkeypatch.setattr("mlx.core.save_safetensors", full)
    with pytest.raises(SessionFileError, match=r"to file \(is the disk full\?\)\. What was said .* kept\.unsaved"):
        talk(["one"], "a", autosave=tmp_path / "kept")
    assert [p.name for p in tmp_path.iterdir()] == ["kept.unsaved"]


def test_every_turn_and_every_change_is_noted_before_the_next_line_is_read(talk: Talk, tmp_path: Path) -> None:
    file, notes = tmp_path / "kept", []

    class Looking(list[Any]):
        def pop(self, *place: Any) -> Any:
            note = tmp_path / "kept.unsaved"
            notes.append([m["content"] for m in json.loads(note.read_text())["messages"]] if note.exists() else None)
            return super().pop(*place)

    lines = Looking(["one", "/help", "two", "/undo", "/system S"])
    _, repl = talk(lines, "a", "b", autosave=file)
    assert notes == [None, ["one", "a"], ["one", "a"], ["one", "a", "two", "b"], ["one", "a"]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept"], "the file holds it now"
    assert contents(repl) == ["S", "one", "a"]


def test_a_note_that_cannot_be_written_is_said_and_the_talk_goes_on(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise SessionFileError("what was said cannot be noted: no space left")

    monkeypatch.setattr("swiftlet_mlx.sidecar.write", full)
    out, repl = talk(["one", "two"], "a", "b", autosave=tmp_path / "kept")
    assert out.count("cannot be noted") == 2
    assert contents(repl) == ["one", "a", "two", "b"]


def test_interrupts_at_the_prompt(talk: Talk) -> None:
    out, repl = talk([KeyboardInterrupt, "one", KeyboardInterrupt, KeyboardInterrupt, "two"], "a")
    assert out.endswith("<left>")
    assert contents(repl) == ["one", "a"]


def test_a_full_context_offers_to_drop_the_oldest_exchange(talk: Talk) -> None:
    _, repl = talk(["word " * 20, "word " * 30, "y"], "a", "b", context=180)
    assert contents(repl)[0] == "word " * 30
    out, repl = talk(["word " * 20, "word " * 30, "n"], "a", "b", context=180)
    assert contents(repl) == ["word " * 20, "a"]
    assert "the context holds 180" in out


def test_a_thought_that_fills_the_budget_is_said_to_be_no_answer(talk: Talk) -> None:
    out, repl = talk(
        ["/set max_tokens 4", "one", "/set max_tokens auto", "/retry"], "hm hm hm</think>a", opening="always"
    )
    assert "before an answer came" in out
    assert contents(repl) == ["one", "a"]


def test_settings_reach_the_answer(talk: Talk) -> None:
    _, repl = talk(["/set min_tokens 5", "one"], "a")
    assert len(contents(repl)[1]) > 1, "the end token is held back"
    out, repl = talk(
        ["/set max_tokens 40", "/set sentence_end on", "one"], "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa. bbbbbb"
    )
    assert contents(repl)[1].endswith("a.")
    assert "cut off" in out


def breaks(step: int, times: int) -> Callable[[int], None]:
    """A failed read at the given token of a reply, so many times."""
    left = [times]

    def on_step(i: int) -> None:
        if i == step and left[0]:
            left[0] -= 1
            raise ReadFailed("layer 3, expert 7: got 5 of 9 bytes")

    return on_step


def test_a_failed_read_in_an_answer_is_reported_and_the_question_can_be_asked_again(talk: Talk) -> None:
    out, repl = talk(["one", "two", "/history", "/retry", "three"], "abc", on_step=breaks(2, 1))
    assert "layer 3, expert 7" in out
    assert contents(repl) == ["two", "abc", "one", "abc", "three", "abc"] or contents(repl)[0] == "two"
    out, repl = talk(["one", "/retry"], "abc", on_step=breaks(2, 1))
    assert contents(repl) == ["one", "abc"]


def test_an_answer_that_is_stopped_early_leaves_no_question_twice(talk: Talk) -> None:
    """The model thinks past its budget: no answer. An edited question is asked again, an old answer stays."""
    steps = ["/set max_tokens 4", "/edit", "uno", "/set max_tokens auto", "/retry"]
    _, repl = talk(["one", *steps], "a</think>b", "hm hm hm hm</think>c", "d</think>e", opening="always")
    assert contents(repl) == ["uno", "e"]
    steps = ["/set max_tokens 4", "/retry", "/set max_tokens auto", "/retry"]
    out, repl = talk(["one", *steps], "a</think>b", "hm hm hm hm</think>c", "d</think>e", opening="always")
    assert "the old one is kept" in out
    assert contents(repl) == ["one", "e"]


def test_a_file_waits_while_its_message_is_refused(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("milk")
    _, repl = talk([f"/file {tmp_path}/notes", "word " * 60, "short"], "a", context=180)
    assert contents(repl)[0] == "notes:\n```\nmilk\n```\n\nshort"


def test_the_file_of_a_conversation_is_gone_on_with_unless_it_is_another_model_s_or_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that differ in nothing but their weights are told apart."""
    one, other = (
        make_checkpoint(tmp_path / f"model{seed}", "qwen3_next", tokenizer=True, seed=seed) for seed in (0, 1)
    )
    file = tmp_path / "talk"
    options = ["Hi", "--session", str(file), "--max-tokens", "3", "--quiet"]
    assert run(app, ["chat", str(one), *options]) == 0
    assert run(app, ["chat", str(one), "And?", *options[1:]]) == 0
    assert [m["content"] for m in json.loads(read_metadata(file))["messages"]][::2] == ["Hi", "And?"]
    saved = file.read_bytes()
    assert run(app, ["chat", str(other), *options]) == 1
    assert f"{file} was saved with another model" in capsys.readouterr().err
    assert file.read_bytes() == saved
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(app, ["chat", str(one), *options[1:3]]) == 0
    assert "Going on with 2 questions; the last one: And?" in capsys.readouterr().err
    saved = file.read_bytes()
    file.write_bytes(damaged := saved[:-7])
    assert run(app, ["chat", str(one), *options]) == 1
    assert str(file) in capsys.readouterr().err
    assert file.read_bytes() == damaged


@pytest.mark.parametrize("place", ["", "missing/talk", "folder"])
def test_a_place_that_cannot_keep_the_conversation_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert run(app, ["chat", "demo", "Hi", "--session", place]) == 2
    assert capsys.readouterr().err.startswith("swiftlet-mlx: --session ")


def test_quiet_shows_answers_only(talk: Talk) -> None:
    assert talk(["one"], "a", quiet=True)[0] == "a\n\n"


# ---- the screen -----------------------------------------------------------------------------------------------------


def drawn(*events: Any, width: int = 40, height: int = 10, fold: bool = True) -> list[str]:
    """What a terminal shows after these events."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=width, height=height, color_system="standard", highlight=False
    )
    with LiveAnswer(console, fold=fold) as answer:
        for event in events:
            answer._drawn = 0.0  # draw every time
            answer.show(event)
    screen = pyte.HistoryScreen(width, height, history=10_000, ratio=1.0)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    past = ["".join(line[x].data for x in range(width)).rstrip() for line in screen.history.top]
    return [line for line in [*past, *(row.rstrip() for row in screen.display)] if line]


def test_an_answer_taller_than_the_screen_is_shown_whole_and_once() -> None:
    text = "\n".join(["```", *(f"line {i}" for i in range(40)), "```", "", *(f"word{i} " * 8 for i in range(9))])
    found = drawn(*(TextDelta(text[i : i + 7]) for i in range(0, len(text), 7)))
    assert [line.strip() for line in found if "line" in line] == [f"line {i}" for i in range(40)]
    assert "\n".join(found).count("word8") == 8


def test_a_long_prompt_shows_how_far_it_is_read() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=10)
    with LiveAnswer(console) as answer:
        answer.show(Progress(512, 2048))
        assert "reading 512 of 2,048 tokens" in file.getvalue()
    assert "reading" not in "".join(drawn(Progress(512, 2048), TextDelta("Done."))), "and leaves no trace"


def test_thoughts_fold_to_a_line_or_stay() -> None:
    events = [ThinkingDelta("hm, "), ThinkingDelta("well " * 40), TextDelta("So.")]
    folded = drawn(*events)
    assert re.fullmatch(r"\(thought for [\d.]+ s\)", folded[0])
    assert folded[1:] == ["So."]
    assert drawn(*events, fold=False)[0].startswith("hm, well")


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    evil = "a\x1b]52;c;ZXZpbA==\x07b\x1b[2J\x9b31m\x00\x7f"
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=10, highlight=False)
    with LiveAnswer(console) as answer:
        answer.show(ThinkingDelta(evil))
        answer.show(TextDelta(evil + "[link](http://example.com/real)"))
    out = file.getvalue()
    assert "\x1b]" not in out
    assert "\x1b[2J" not in out
    assert not set(out) & set("\x00\x07\x7f\x9b")
    assert "example.com/real" in out, "addresses are shown"
    assert printable("tab\tand\nnewline") == "tab\tand\nnewline"


@given(
    st.lists(
        st.sampled_from(
            ["# T\n", "\n", "text\n", "- a\n", "  more\n", "1. b\n", "```\n", "~~~\n", "    code\n", "> q\n", "x"]
        ),
        max_size=20,
    ),
    st.data(),
)
def test_blocks_lose_nothing_and_do_not_depend_on_the_cuts(lines: list[str], data: st.DataObject) -> None:
    text = "".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    found = []
    for pieces in ([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], list(text)):
        blocks = Blocks()
        found.append([b for piece in pieces for b in blocks.add(piece)] + [blocks.rest().strip("\n")])
    assert found[0] == found[1]
    assert "".join(found[0]).replace("\n", "") == text.replace("\n", "")


def test_a_code_block_is_never_cut() -> None:
    blocks = Blocks()
    assert blocks.add("```\na\n\nb\n\nc\n") == []
    assert blocks.add("```\n\nnext") == ["```\na\n\nb\n\nc\n```"]
    assert blocks.rest() == "next"
