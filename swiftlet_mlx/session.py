"""One conversation on an engine: its messages, its turns, its file.

Knows completions and messages; the caches live in the engine's store, found again by token ids. Invariant:
the conversation is its messages. Whatever was sent, edited, undone or cancelled, the next reply is the one
that a fresh session with the same messages would give.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from . import sessionfile, sidecar
from .completion import Ask, Completions
from .engine import Engine, Stream
from .errors import ContextFull, MessageError, OptionError, SessionBusy, SessionFileError, WrongModel
from .messages import Message, checked_messages, encodable
from .reply import assistant_message
from .turn import Turn

MIN_REPLY_TOKENS = 64
"""A turn is refused when the context holds less than this, or the asked-for budget, for the reply."""


class Session:
    """A conversation.

    Args:
        model: an Engine, a Completions, or a model as `swiftlet_mlx.load` returns it. With a bare model the
            session makes an engine of its own, and `close()` ends it.
        tokenizer: with a bare model, its tokenizer.
        system: the system prompt.
        messages: a conversation to go on with, in OpenAI's form.
        ask: how replies are wanted, unless `send` says otherwise.

    What happens to a turn that ends early: a reply that was cancelled, or cut by its budget, stays in the
    history as far as it was given out. A turn that ends before any answer was given out (in the middle of a
    thought, say) is taken back, question included, and so is one that fails.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        system: str | None = None,
        messages: Iterable[Message] = (),
        ask: Ask | None = None,
        **engine_options: Any,
    ) -> None:
        self._own_engine: Engine | None = None
        if isinstance(model, Completions):
            self.completions = model
        elif isinstance(model, Engine):
            self.completions = Completions(model)
        elif tokenizer is None:
            raise OptionError("A session on a bare model needs its tokenizer too: Session(model, tokenizer).")
        else:
            self._own_engine = Engine(lambda: (model, tokenizer), **engine_options)
            self.completions = Completions(self._own_engine)
        self.ask = ask or Ask()
        self._lock = threading.RLock()
        self._turn: Turn | None = None
        self._preparing: Stream | None = None
        self._messages: list[dict[str, Any]] = []
        self._before: list[dict[str, Any]] = []
        given = list(messages)
        self._messages = checked_messages(given) if given else []
        if system is not None:
            self.system = system

    # ---- the conversation
    # ----------------------------------------------------------------------------------------

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, oldest first. A copy; `edit` and the others change it."""
        with self._lock:
            return [dict(m) for m in self._messages]

    @property
    def system(self) -> str:
        """The system prompt; empty if there is none. Setting it keeps the rest of the conversation."""
        with self._lock:
            first = self._messages[:1]
            return str(first[0]["content"]) if first and first[0]["role"] == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        with self._changing():
            rest = self._messages[self._starts_with_system() :]
            self._messages = [*([{"role": "system", "content": encodable(text)}] if text else []), *rest]

    def send(self, message: str | Message | Sequence[Message], ask: Ask | None = None, **options: Any) -> Turn:
        """Say something and have it answered.

        Args:
            message: the user's words, or one or more messages (tool results, say).
            ask: how the reply is wanted; None takes the session's.
            options: fields of Ask or Sampling to change for this turn: `send("Hi", temperature=0,
                max_tokens=9)`.

        Returns:
            The turn, already under way.

        Raises:
            SessionBusy: the last turn is still going on.
            MessageError, OptionError: the message or an option cannot be honoured.
            ContextFull: history and reply do not fit; see `drop_oldest`.
        """
        new: list[Any]
        if isinstance(message, str):
            new = [{"role": "user", "content": message}]
        elif isinstance(message, Mapping):
            new = [message]
        elif isinstance(message, Sequence):
            new = [*message]
        else:
            raise MessageError(f"A message is text, a message or a list of them; found {type(message).__name__}.")
        with self._changing():
            return self._answer([*self._messages, *checked_messages(new)], ask, options)

    def regenerate(self, ask: Ask | None = None, **options: Any) -> Turn:
        """Answer the last question again. The old answer is gone once the new one has begun.

        Raises:
            MessageError: there is nothing to answer.
            SessionBusy, OptionError, ContextFull: as `send` does.
        """
        with self._changing():
            last = self._last_question()
            return self._answer(self._messages[: last + 1], ask, options)

    def edit(self, n: int, text: str) -> None:
        """Replace the text of message n and drop everything after it; `regenerate` then answers it.

        Args:
            n: place in `messages`; negative counts from the end.

        Raises:
            MessageError: there is no such message, or the text is none.
            SessionBusy: a turn is going on.
        """
        if not isinstance(text, str):
            raise MessageError(f"The text of a message is text; found {type(text).__name__}.")
        with self._changing():
            if not -len(self._messages) <= n < len(self._messages):
                raise MessageError(f"There is no message {n}; there are {len(self._messages)}.")
            n %= len(self._messages)
            kept = {k: v for k, v in self._messages[n].items() if k != "reasoning_content"}
            self._messages = [*self._messages[:n], {**kept, "content": encodable(text)}]

    def undo(self) -> str:
        """Drop the last exchange and return its question, for another try.

        Raises:
            MessageError: there is none.
            SessionBusy: a turn is going on.
        """
        with self._changing():
            last = self._last_question()
            text = str(self._messages[last]["content"])
            self._messages = self._messages[:last]
            return text

    def drop_oldest(self) -> list[dict[str, Any]]:
        """Drop the oldest exchange, to make room; the system prompt stays.

        Returns:
            The messages dropped.

        Raises:
            MessageError: there is none.
            SessionBusy: a turn is going on.
        """
        with self._changing():
            users = [i for i, m in enumerate(self._messages) if m["role"] == "user"]
            if not users:
                raise MessageError("There is no exchange to drop.")
            end = users[1] if len(users) > 1 else len(self._messages)
            dropped = self._messages[users[0] : end]
            self._messages = self._messages[: users[0]] + self._messages[end:]
            return dropped

    def reset(self) -> None:
        """Forget the conversation; the system prompt stays.

        Raises:
            SessionBusy: a turn is going on.
        """
        with self._changing():
            self._messages = self._messages[: self._starts_with_system()]

    def cancel(self) -> None:
        """End the turn that is going on, if one is. From any thread."""
        turn = self._turn
        if turn is not None:
            turn.cancel()

    def close(self) -> None:
        """End the turn and, if the session made its own engine, the engine."""
        turn = self._turn
        if turn is not None:
            turn.close()
        if self._own_engine is not None:
            self._own_engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- its file
    # ----------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Save messages and caches, so that `load` goes on without reading anything again.

        Raises:
            SessionBusy: a turn is going on.
            SessionFileError: the file cannot be written.
        """
        with self._changing():
            messages, target = [dict(m) for m in self._messages], Path(path)
            ids = self.completions.history(messages, self.ask)
            model, store = self.completions.fingerprint(), self.engine.store
            try:
                self.engine.call(lambda: sessionfile.write(target, messages, model, store.copy(ids))).result()
            except SessionFileError as error:
                note = sidecar.beside(target)
                if note.exists():
                    raise SessionFileError(
                        f"{error} What was said is not lost: {note.name} beside it holds it for the next time."
                    ) from error
                raise
            sidecar.drop(target)

    def note(self, path: Path | str) -> None:
        """Note the messages beside a file that is to be saved later: `load` finds them should it never come to that.

        Takes milliseconds, whatever `save` takes, and is meant to be done after each turn.

        Raises:
            SessionBusy: a turn is going on.
            SessionFileError: the note cannot be written.
        """
        with self._changing():
            sidecar.write(Path(path), self._messages, self.completions.fingerprint())

    @staticmethod
    def is_saved(path: Path | str) -> bool:
        """Whether `load` would find something: a saved conversation, or what was noted beside where one was to be."""
        return Path(path).exists() or sidecar.beside(Path(path)).exists()

    @classmethod
    def load(
        cls, path: Path | str, model: Any, tokenizer: Any = None, *, ask: Ask | None = None, **options: Any
    ) -> Session:
        """Open a saved conversation on the model it was saved with; the arguments are those of Session.

        What was noted after the file was saved is part of it.

        Raises:
            WrongModel: it belongs to another model.
            SessionFileError: it is not a saved conversation, or it is damaged.
        """
        file = Path(path)
        unsaved = sidecar.read(file)
        saved = None if unsaved is not None and not file.exists() else sessionfile.read(file)
        messages = unsaved.messages if unsaved is not None else saved.messages if saved is not None else []
        try:
            session = cls(model, tokenizer, messages=messages, ask=ask, **options)
        except MessageError as error:
            raise SessionFileError(f"{file} holds a message that cannot be used: {error}") from error
        try:
            model, engine = session.completions.fingerprint(), session.engine
            if unsaved is not None and unsaved.model != model:
                raise WrongModel(f"{unsaved.path} was noted with another model. Open it with the model it belongs to.")
            if saved is not None:
                engine.call(lambda: _restore(engine, saved, model)).result()
        except BaseException:
            session.close()
            raise
        return session

    def prepare(self) -> Stream | None:
        """Read the history now, so that the next turn has only its own words to read.

        After a reply whose thoughts the template strips (or whose text is split into other tokens when it is
        read back), the answer must be read again as history. The engine does that by itself when it has been idle for
        a while; this does not wait. Any request interrupts it.

        Returns:
            The reading under way, to be waited for by whoever wants to; None if there is nothing to read.
        """
        with self._lock:
            request = self.completions.preparation(self._messages, self.ask)
        if request is not None and (self._preparing is None or self._preparing.done):
            self._preparing = self.engine.submit(request)
        return self._preparing

    @property
    def engine(self) -> Engine:
        """The engine that answers."""
        return self.completions.engine

    # ---- inside
    # --------------------------------------------------------------------------------------------------

    def _answer(self, messages: list[dict[str, Any]], ask: Ask | None, options: dict[str, Any]) -> Turn:
        base = ask or self.ask
        for_ask = {k: v for k, v in options.items() if k in _ASK_FIELDS}
        for_sampling = {k: v for k, v in options.items() if k not in _ASK_FIELDS}
        base = replace(base, **for_ask)
        prompt = self.completions.render(messages, base)
        sampling = base.sampling or self.completions.defaults(thinking=prompt.opens_thinking)
        base = replace(base, sampling=sampling.with_values(**for_sampling))
        self._check_room(len(prompt.ids), base.max_tokens)
        turn = Turn(self.completions.answer(prompt, base), self._ended)
        self._before, self._messages, self._turn = self._messages, messages, turn
        return turn

    def _check_room(self, prompt_tokens: int, max_tokens: int | None) -> None:
        wanted = min(max_tokens or MIN_REPLY_TOKENS, MIN_REPLY_TOKENS)
        context = self.engine.context_tokens
        if context is not None and prompt_tokens + wanted > context:
            raise ContextFull(
                f"The conversation has {prompt_tokens} tokens and the context holds {context}, so less than {wanted} "
                "are left for the reply. Drop the oldest exchange, or start anew.",
                prompt_tokens=prompt_tokens,
                reply_tokens=wanted,
                context_tokens=context,
            )

    def _ended(self, turn: Turn) -> None:
        """Take a finished turn into the history, or take the question back."""
        with self._lock:
            if self._turn is not turn:
                return
            self._turn = None
            finish = turn.finish
            answered = finish is not None and (turn.text or turn.tool_calls or finish.reason == "stop")
            if not answered:
                self._messages = self._before
                return
            reply = assistant_message(turn.text, turn.thinking, turn.tool_calls)
            self._messages = [*self._messages, reply]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, with no turn going on."""
        turn = self._turn
        if turn is not None and turn.ending:
            turn.close()  # not under the lock: its reader may need that to note the end
        with self._lock:
            if self._turn is not None:
                raise SessionBusy("The session is still answering. Read the turn to its end, or cancel() it.")
            yield

    def _starts_with_system(self) -> int:
        return int(bool(self._messages) and self._messages[0]["role"] == "system")

    def _last_question(self) -> int:
        for i in range(len(self._messages) - 1, -1, -1):
            if self._messages[i]["role"] == "user":
                return i
        raise MessageError("Nothing has been asked yet.")


def _restore(engine: Engine, saved: sessionfile.Saved, model: str) -> None:
    """On the engine thread."""
    timeline = sessionfile.restore(saved, engine.model, model)
    if timeline is not None:
        engine.store.put(timeline)


_ASK_FIELDS = {f.name for f in fields(Ask)}
