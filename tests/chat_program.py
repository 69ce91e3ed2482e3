"""The chat's screen with a scripted model, run by test_chat.py in a terminal of its own.

    python chat_program.py SCRIPT.json

SCRIPT holds: replies (texts), delay (seconds a token), opening (of the chat template), context, session (a file).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console
from talkers import Scripted, chat_template, tokenizer

from swiftlet_mlx.cli.chat import _ended_by_signals
from swiftlet_mlx.cli.lines import Lines, history_file
from swiftlet_mlx.cli.repl import Repl
from swiftlet_mlx.cli.run import run
from swiftlet_mlx.completion import Ask, Completions
from swiftlet_mlx.engine import Engine
from swiftlet_mlx.session import Session


def main() -> None:
    script = json.loads(Path(sys.argv[1]).read_text())
    words = tokenizer(chat_template(script.get("opening", "none")))
    replies = [words.encode(r, add_special_tokens=False) for r in script["replies"]]
    delay = script.get("delay", 0)
    model = Scripted(
        replies,
        eos=words.convert_tokens_to_ids("<|im_end|>"),
        context=script.get("context", 4096),
        on_step=lambda _: time.sleep(delay),
    )
    with Engine(lambda: (model, words)) as engine:
        completions = Completions(engine)
        file = Path(script["session"]) if "session" in script else None
        known = file is not None and Session.is_saved(file)
        session = Session.load(file, completions) if file and known else Session(completions, ask=Ask())
        repl = Repl(session, Console(highlight=False), Lines(history_file()), autosave=file)
        with _ended_by_signals():
            repl.run()


if __name__ == "__main__":
    import typer

    program = typer.Typer()
    program.command()(main)
    sys.argv[1:], script_path = [], sys.argv[1]
    sys.argv.append(script_path)
    sys.exit(run(program, []))
