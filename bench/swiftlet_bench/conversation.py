"""What a conversation costs after its first turn: the next turn, a checkpoint, a reopened file, two hundred turns.

    python -m swiftlet_bench.conversation MODEL --first-tokens 2000 --rounds 15

One long first question; then, in turn and again and again, a second question (on the conversation as it was after the
first, opened from its file) and a bare prompt: a question of the same length asked of an engine that has read nothing.
The same once more after the idle time between turns has been used to read the answer as history, as every engine does
while a person types. Seconds of the machine and of the processor are both noted up to the first token, for the former
suffer from whatever else is running. Then checkpoints a token apart, and the file, opened several times. `--turns`
holds one conversation of short turns and notes the memory. Ratios are taken inside a round. Prints one JSON object a
line.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from swiftlet_mlx.completion import Ask, Completions
from swiftlet_mlx.config import read_config
from swiftlet_mlx.engine import Engine
from swiftlet_mlx.errors import ContextFull
from swiftlet_mlx.events import Statistics
from swiftlet_mlx.loader import load
from swiftlet_mlx.locate import find_model
from swiftlet_mlx.sampling import Sampling
from swiftlet_mlx.session import Session
from swiftlet_mlx.timeline import Timeline
from swiftlet_mlx.turn import Turn

from . import process
from .harness import Spread, Values, collect, in_turn, ratio
from .lines import say, setting
from .synthetic import is_synthetic

WORDS = (
    "river", "old", "stone", "bridges", "seven", "birds", "count", "boats", "that", "come", "home", "small", "runs",
)  # fmt: skip
N_CHECKPOINTS = 20


def words(n: int, seed: int) -> str:
    """A text of n words that begins differently for each seed."""
    return " ".join([str(seed), *(WORDS[(i * 7 + seed * 5 + i // 11) % len(WORDS)] for i in range(n - 1))])


def long_enough(completions: Completions, n_tokens: int, seed: int) -> str:
    """A question whose prompt has at least so many tokens."""
    n = n_tokens // 8
    while len(completions.render([{"role": "user", "content": words(n, seed)}]).ids) < n_tokens:
        n = n * 9 // 8 + 1
    return words(n, seed)


def said(turn: Turn) -> Statistics:
    """The turn's figures, once it is over."""
    for _ in turn:
        pass
    assert turn.statistics is not None
    return turn.statistics


class Readable:
    """Lets a model of random weights say only what comes back as the same tokens when its text is read again, as the
    words of a trained model mostly do. Each id alone does; that neighbours do not join is up to the tokenizer."""

    def __init__(self, tokenizer: Any, n_vocab: int) -> None:
        same = [i for i in range(n_vocab) if tokenizer.encode(tokenizer.decode([i]), add_special_tokens=False) == [i]]
        self._same = [i for i in same if tokenizer.decode([i]).isalpha()]
        self._others: mx.array | None = None

    def __call__(self, _generated: list[int], logits: mx.array) -> mx.array:
        if self._others is None:
            others = np.full(logits.shape[-1], -1e9, dtype=np.float32)
            others[self._same] = 0.0
            self._others = mx.array(others)
        return logits + self._others


def prepared(session: Session) -> None:
    """Use the idle time, and wait until it has been."""
    for _ in session.prepare() or ():
        pass


def first_turn(completions: Completions, ask: Ask, n_tokens: int, file: Path | None) -> tuple[Session, float | None]:
    """The conversation after its long first turn, and what reading that took; None if it was in a file already."""
    if file is not None and file.exists():
        return Session.load(file, completions, ask=ask), None
    session = Session(completions, ask=ask)
    first = said(session.send(long_enough(completions, n_tokens, 0)))
    say(
        case="first turn", prompt_tokens=first.prompt_tokens, generated_tokens=first.generated_tokens,
        prefill_seconds=first.prefill_seconds, ttft_seconds=first.ttft_seconds,
    )  # fmt: skip
    if file is not None:
        session.save(file)
    return session, first.prefill_seconds


def asked(session: Session, text: str) -> Values:
    """What the first token of an answer costs."""
    used = process.cpu_seconds()
    turn = said(session.send(text, max_tokens=1))
    used = process.cpu_seconds() - used
    return {
        "read_tokens": turn.prompt_tokens - turn.cached_tokens,
        "ttft_seconds": turn.ttft_seconds,
        "cpu_seconds": used,
    }


def beside_bare(session: Session, rounds: int, question_words: int, seed: int) -> dict[str, dict[str, Spread]]:
    """A next question and a bare prompt, in turn.

    Args:
        session: The conversation as the question finds it.
        rounds: Of both.
        question_words: Length of the questions.
        seed: Of the first; each has another.
    """
    completions, engine, ask = session.completions, session.engine, session.ask
    seeds = iter(range(seed, seed + 2 * rounds + 8))
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "talk")

        def later() -> Values:
            engine.call(engine.store.clear).result()
            known = Session.load(Path(folder) / "talk", completions, ask=ask)
            return asked(known, words(question_words, next(seeds)))

        def bare() -> Values:
            engine.call(engine.store.clear).result()
            return asked(Session(completions, ask=ask), words(question_words, next(seeds)))

        found = in_turn({"later": later, "bare": bare}, rounds)
        engine.call(engine.store.clear).result()
        Session.load(Path(folder) / "talk", completions, ask=ask)  # what has been read is known again
    return found


def checkpoints(model: Any, timeline: Timeline) -> Spread:
    """Seconds of each of some checkpoints, a token apart. On the engine thread."""
    seconds = []
    for token in timeline.ids[:N_CHECKPOINTS]:
        mx.eval(model(mx.array([[token]]), cache=timeline.caches))
        timeline.fed([token])
        timeline.evaluate()
        started = time.perf_counter()
        timeline.checkpoint()
        seconds.append(time.perf_counter() - started)
    return Spread(tuple(seconds))


def reopened(session: Session, times: int) -> tuple[dict[str, Spread], Session]:
    """Save the conversation, forget everything, open it; several times."""
    completions, engine, runs = session.completions, session.engine, []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "conversation"
        for _ in range(times):
            started = time.perf_counter()
            session.save(file)
            saved = time.perf_counter()
            engine.call(engine.store.clear).result()
            forgotten = time.perf_counter()
            session = Session.load(file, completions, ask=session.ask)
            opened = time.perf_counter()
            runs.append(
                {
                    "save_seconds": saved - started,
                    "open_seconds": opened - forgotten,
                    "file_bytes": file.stat().st_size,
                }
            )
    return collect(runs), session


def many_turns(completions: Completions, n: int, ask: Ask) -> None:
    """One conversation of n short turns; where the context is full the oldest exchange goes, as `chat` offers."""
    engine = completions.engine
    engine.call(engine.store.clear).result()
    session = Session(completions, ask=ask)
    dropped = 0
    for i in range(1, n + 1):
        while True:
            try:
                turn = session.send(words(2, i))
                break
            except ContextFull:
                session.drop_oldest()
                dropped += 1
        figures = said(turn)
        if i == 1 or i % max(1, n // 10) == 0:
            kept = engine.call(lambda: engine.store.nbytes).result()
            say(
                case="turns", turn=i, context=figures.prompt_tokens, read=figures.prompt_tokens - figures.cached_tokens,
                ttft_seconds=figures.ttft_seconds, rss_bytes=process.now_bytes(), mlx_bytes=mx.get_active_memory(),
                store_bytes=kept, store_budget_bytes=engine.store.budget_bytes, dropped=dropped,
            )  # fmt: skip


def run(argv: list[str] | None = None) -> None:
    """Measure as the arguments say and print JSON lines."""
    parser = argparse.ArgumentParser(prog="swiftlet_bench.conversation", description=__doc__)
    parser.add_argument("model", help="container, checkpoint folder, installed model, or demo")
    parser.add_argument("--first-tokens", type=int, default=2000, help="length of the first prompt")
    parser.add_argument("--talk", type=Path, default=None, help="keep the first turn here, or take it up from here")
    parser.add_argument("--prepared", action="store_true", help="only the turn after idle time")
    parser.add_argument("--question-words", type=int, default=40, help="length of the later ones")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of the replies")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=0, help="also a conversation of so many turns, for its memory")
    parser.add_argument("--cache-gb", type=float, default=None, help="memory for experts")
    parser.add_argument("--prefix-cache-gb", type=float, default=None, help="memory for past conversations")
    args = parser.parse_args(argv)

    def show(case: str, spread: Spread) -> None:
        say(case=case, median=spread.median, low=spread.low, high=spread.high, n=spread.n, flags=spread.flags())

    folder = find_model(args.model)
    opened = Engine(
        lambda: load(folder, cache_gb=args.cache_gb), prefix_cache_gb=args.prefix_cache_gb, idle_seconds=None
    )
    with opened as engine:
        completions = Completions(engine, folder)
        words_only = [Readable(engine.tokenizer, len(engine.tokenizer))] if is_synthetic(read_config(folder)) else []
        ask = Ask(sampling=Sampling(), max_tokens=args.max_tokens, thinking=False, processors=tuple(words_only))
        about = setting(
            folder, first_tokens=args.first_tokens, max_tokens=args.max_tokens, rounds=args.rounds,
            store_budget_bytes=engine.store.budget_bytes,
        )  # fmt: skip
        say(**about)
        if args.rounds:
            session, prefill_seconds = first_turn(completions, ask, args.first_tokens, args.talk)
            for kind in ("second turn", "second turn, prepared")[args.prepared :]:
                if kind != "second turn":
                    prepared(session)
                found = beside_bare(session, args.rounds, args.question_words, len(kind) * 1000)
                for name, spread in found["later"].items():
                    show(f"{kind}: {name}", spread)
                    show(f"bare prompt: {name}", found["bare"][name])
                    show(f"{kind} / bare prompt: {name}", ratio(spread, found["bare"][name]))
            files, session = reopened(session, 5)
            for name, spread in files.items():
                show(name, spread)
            if prefill_seconds is not None:
                say(case="open / prefill", ratio=files["open_seconds"].median / prefill_seconds)
            for name, value in asked(session, words(args.question_words, 1)).items():
                say(case=f"reopened: {name}", value=value)
            model, ids = engine.model, tuple(completions.render(session.messages).ids)

            def at_the_end() -> Spread:
                timeline = engine.store.find(ids)
                assert timeline is not None
                engine.store.clear()
                return checkpoints(model, timeline)

            show("checkpoint seconds", engine.call(at_the_end).result())
        if args.turns:
            many_turns(completions, args.turns, ask)


if __name__ == "__main__":
    run(sys.argv[1:])
