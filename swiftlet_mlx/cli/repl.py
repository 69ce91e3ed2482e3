"""The conversation at a terminal: reads messages and commands, shows answers, keeps the session's file.

Knows sessions, not how models are loaded. Ctrl-C during an answer ends the answer; what was shown of it stays in the
conversation. A second Ctrl-C, at the prompt, leaves with 130.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from swiftlet_mlx.errors import ContextFull, MessageError, OptionError, SwiftletError
from swiftlet_mlx.events import Statistics
from swiftlet_mlx.sampling import Sampling
from swiftlet_mlx.session import Session
from swiftlet_mlx.turn import Turn

from . import console as words
from . import settings, status
from .answer import Answer, LiveAnswer, PlainAnswer
from .attached import attachment, text_of
from .lines import Lines


class Repl:
    """A conversation with a person.

    Args:
        session: the conversation.
        out: where answers go.
        lines: where messages come from.
        quiet: no status lines.
        memory: tells the bytes in use, for the status line.
        autosave: the file the conversation is kept in when it ends; beside it what is said is noted turn by turn.
    """

    def __init__(
        self,
        session: Session,
        out: Console,
        lines: Lines,
        *,
        quiet: bool = False,
        memory: Callable[[], int] = lambda: 0,
        autosave: Path | None = None,
    ) -> None:
        self.session = session
        self._out = out
        self._lines = lines
        self._quiet = quiet
        self._memory = memory
        self._autosave = autosave
        self._fold = True
        self._attached: list[str] = []
        self._taken_back = ""
        self._noted = session.messages
        self._interrupted = False
        self._last: Statistics | None = None
        self._turns = 0
        self._tokens = 0
        self._commands: dict[str, Callable[[str], bool | None]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Talk until end of file or /exit.

        Raises:
            KeyboardInterrupt: a second Ctrl-C at the prompt.
        """
        try:
            if self.session.messages and not self._quiet:
                words.say(f"Going on with {self._so_far()}")
            if self._lines.interactive and not self._quiet:
                words.say("Type a message; /help lists commands; Ctrl-D leaves.")
            while self._step():
                pass
        finally:
            self._lines.close()
            self.close()

    def close(self) -> None:
        """Keep the conversation, if it has a file."""
        if self._autosave is not None:
            self.session.cancel()
            self.session.save(self._autosave)

    def _step(self) -> bool:
        try:
            text = self._lines.read("> ")
        except EOFError:
            if self._lines.interactive:
                words.say("")
            return False
        except KeyboardInterrupt:
            if self._interrupted or not self._lines.interactive:
                raise
            self._interrupted = True
            words.say("\n(Ctrl-C again leaves; /help lists commands)")
            return True
        self._interrupted = False
        if not text.strip() and not self._attached:
            return True
        try:
            return self._obey(text)
        except SwiftletError as error:
            words.warn(str(error))
        except KeyboardInterrupt:  # in a command, or again while an answer is being ended
            self.session.cancel()
            self._interrupted = True
            words.say("\nstopped")
        finally:
            self._note()
        return True

    def _note(self) -> None:
        """Keep what has been said, should the end come without warning. Not being able to is no reason to stop."""
        if self._autosave is None or (said := self.session.messages) == self._noted:
            return
        self._noted = said
        try:
            self.session.note(self._autosave)
        except SwiftletError as error:
            words.warn(str(error))

    def _obey(self, text: str) -> bool:
        first, _, rest = text.strip().partition(" ")
        if text.startswith("/") and "/" not in first[1:]:
            command = self._commands.get(first[1:])
            if command is None:
                near = difflib.get_close_matches(first[1:], self._commands, 1)
                hint = f" Did you mean /{near[0]}?" if near else " /help lists commands."
                words.warn(
                    f"There is no command {first}.{hint} To begin a message with a slash, put a space before it."
                )
                return True
            return command(rest.strip()) is not False
        self.ask(text)
        return True

    # ---- answers -------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> bool:
        """Send a message, with the files that wait to go before it, and show the answer.

        Returns:
            False if it was interrupted.
        """
        return self._send("".join(self._attached) + text)

    def _send(self, text: str) -> bool:
        return self._answer(lambda: self.session.send(text), text)

    def _answer(self, begin: Callable[[], Turn], question: str = "") -> bool:
        """Show an answer; without one, a question that was sent anew is what /retry asks."""
        self._taken_back = question
        try:
            turn = begin()
        except ContextFull as error:
            if not self._may_drop(error):
                raise
            return self._answer(begin, question)
        self._attached.clear()
        interrupted = False
        with self._screen() as screen:
            try:
                for event in turn:
                    screen.show(event)
            except KeyboardInterrupt:
                turn.close()
                interrupted = self._interrupted = True
        self._report(turn)
        self._note()
        if self._lines.interactive:
            self.session.prepare()
        return not interrupted

    def _screen(self) -> Answer:
        if self._out.is_terminal and not self._out.is_dumb_terminal:
            return LiveAnswer(self._out, fold=self._fold)
        return PlainAnswer(self._out)

    def _may_drop(self, error: ContextFull) -> bool:
        """Offer to make room."""
        if not self._lines.interactive or sum(m["role"] == "user" for m in self.session.messages) == 0:
            return False
        words.warn(str(error))
        if not self._lines.read("Drop the oldest exchange and go on? [y/N] ").strip().lower().startswith("y"):
            return False
        self.session.drop_oldest()
        return True

    def _report(self, turn: Turn) -> None:
        self._turns += 1
        reason = turn.finish.reason if turn.finish is not None else None
        kept = bool(turn.text or turn.tool_calls or reason == "stop")
        if kept:
            self._taken_back = ""
        if not kept:
            why = "stopped" if reason == "cancelled" else "cut off"
            what = "the question is taken back (/retry asks it again)" if self._taken_back else "the old one is kept"
            words.say(f"{why} before an answer came; {what}")
        elif reason == "cancelled":
            words.say("stopped; what was said so far is kept")
        elif reason == "length":
            words.say("cut off at the budget of tokens; /set max_tokens N raises it")
        if turn.statistics is not None:
            self._last = turn.statistics
            self._tokens += turn.statistics.generated_tokens
            if not self._quiet:
                width = words.err.width if words.err.is_terminal else 0
                words.err.print(status.lines_of(self._status(turn.statistics), width), style="dim", markup=False)

    def _status(self, s: Statistics) -> list[str]:
        return status.figures(s, self._memory(), self.session.engine.context_tokens)

    # ---- commands: the first line of each docstring is its help ---------------------------------------------------

    def _do_help(self, _: str) -> None:
        """/help: this list"""
        for command in sorted(self._commands):
            words.say("  " + (self._commands[command].__doc__ or "").strip().splitlines()[0])
        words.say('  A line that ends in \\ goes on; """ opens and closes a message of several lines.')
        words.say("  Ctrl-C stops an answer, a second one leaves; Ctrl-D leaves.")

    def _do_reset(self, _: str) -> None:
        """/reset: forget the conversation, keep the system prompt"""
        self.session.reset()
        self._attached.clear()
        self._taken_back = ""
        words.say("forgotten")

    def _do_undo(self, _: str) -> None:
        """/undo: drop the last exchange"""
        words.say(f"dropped: {_short(self.session.undo())}")

    def _do_retry(self, _: str) -> None:
        """/retry: answer the last question again"""
        if self._taken_back:
            self._send(self._taken_back)
        else:
            self._answer(self.session.regenerate)

    def _do_edit(self, number: str) -> None:
        """/edit [N]: change question N (the last one), drop what follows, answer it"""
        questions = self._questions()
        if not questions:
            raise MessageError("Nothing has been asked yet.")
        if number and not (number.isdecimal() and 1 <= int(number) <= len(questions)):
            raise OptionError(f"/edit takes a number from 1 to {len(questions)}; /history shows them.")
        place, old = questions[int(number) - 1 if number else -1]
        try:
            new = self._lines.read("edit> ", old)
        except (KeyboardInterrupt, EOFError):
            words.say("\nunchanged")
            return
        if not new.strip():
            words.say("unchanged")
            return
        self.session.edit(place, new)
        self._send(self.session.undo())

    def _do_history(self, _: str) -> None:
        """/history: the questions so far, numbered for /edit"""
        for i, (_place, text) in enumerate(self._questions(), 1):
            words.say(f"  {i}. {_short(text)}")

    def _do_save(self, name: str) -> None:
        """/save FILE: keep the conversation with its caches"""
        path = self._path(name, "save")
        self.session.save(path)
        words.say(f"saved to {path}, {words.size(path.stat().st_size)}")

    def _do_load(self, name: str) -> None:
        """/load FILE: go on with a saved conversation"""
        path = self._path(name, "load")
        self.session = Session.load(path, self.session.completions, ask=self.session.ask)
        self._taken_back = ""
        words.say(self._so_far())

    def _do_system(self, text: str) -> None:
        """/system [TEXT]: show or set the system prompt; - removes it"""
        if text:
            self.session.system = "" if text == "-" else text
        words.say(f"system prompt: {self.session.system or '(none)'}")

    def _do_set(self, text: str) -> None:
        """/set [NAME [VALUE]]: show or change how answers are made; auto is the default"""
        name, _, value = text.partition(" ")
        if value:
            self._set(name, value.strip())
        elif name:
            settings.check(name)
        values = {**settings.shown(self.session.ask, self._defaults()), "thoughts": "fold" if self._fold else "show"}
        for key in [name] if name else settings.NAMES:
            words.say(f"  {key} {values[key]}")

    def _do_file(self, text: str) -> None:
        """/file PATH [QUESTION]: put a text file's contents before the next message"""
        try:
            name, *rest = shlex.split(text)
        except ValueError:  # nothing, or a quote without its other half
            name = ""
        if not name:
            raise OptionError("/file takes a path; put it in quotes if it has spaces.")
        path = Path(name).expanduser()
        content = text_of(path)
        n_tokens = len(self.session.completions.template.encode(content))
        words.say(f"{path.name}: {n_tokens:,} tokens, to be sent with the next message")
        self._attached.append(attachment(path.name, content))
        if rest:
            self.ask(" ".join(rest))

    def _do_stats(self, _: str) -> None:
        """/stats: figures of this conversation"""
        engine = self.session.engine
        kept = engine.call(lambda: engine.store.nbytes).result()
        words.say(f"  {_counted(self._turns, 'turn')}, {_counted(self._tokens, 'token')} generated")
        if self._last is not None:
            s = self._last
            width = words.err.width - 8 if words.err.is_terminal else 0
            words.say("  last: " + status.lines_of(self._status(s), width).replace("\n", "\n        "))
            words.say(
                f"  its prompt: {s.prompt_tokens:,} tokens, {s.cached_tokens:,} of them known, the rest read at "
                f"{s.prefill_tokens_per_second:.1f} tok/s"
            )
            if engine.context_tokens:
                total = s.prompt_tokens + s.generated_tokens
                words.say(f"  the conversation: {total:,} tokens of {engine.context_tokens:,} that the context holds")
            if s.counters.get("read_bytes"):
                words.say(f"  it read {words.size(s.counters['read_bytes'])} of experts")
        words.say(f"  conversations kept: {words.size(kept)} of {words.size(engine.store.budget_bytes)}")

    def _do_exit(self, _: str) -> bool:
        """/exit: leave (also /quit, Ctrl-D)"""
        return False

    def _do_quit(self, _: str) -> bool:
        """/quit: leave"""
        return False

    # ---- their parts ---------------------------------------------------------------------------------------------

    def _questions(self) -> list[tuple[int, str]]:
        return [(i, str(m["content"])) for i, m in enumerate(self.session.messages) if m["role"] == "user"]

    def _so_far(self) -> str:
        questions = self._questions()
        last = f"; the last one: {_short(questions[-1][1])}" if questions else ""
        return f"{_counted(len(questions), 'question')}{last}"

    def _path(self, text: str, command: str) -> Path:
        try:
            (name,) = shlex.split(text)
        except ValueError:  # none, several, or a quote without its other half
            name = ""
        if not name:
            raise OptionError(f"/{command} takes one file name; put it in quotes if it has spaces.")
        return Path(name).expanduser()

    def _set(self, name: str, value: str) -> None:
        settings.check(name)
        if name == "thoughts":
            self._fold = settings.choice(name, value, {"fold": True, "show": False})
        else:
            self.session.ask = settings.changed(self.session.ask, self._defaults(), name, value)

    def _defaults(self) -> Sampling:
        completions = self.session.completions
        return completions.defaults(thinking=completions.thinks(self.session.ask))


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
