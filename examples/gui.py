"""Answers into a window: the reply is read in a thread of its own and handed over by callbacks.

A window must not wait, so `ask` returns at once. Replace the callbacks with your toolkit's way of calling its main
thread (Tk's `after`, Qt's signals, asyncio's `call_soon_threadsafe`).

    python examples/gui.py MODEL
"""

import sys
import threading
from collections.abc import Callable

from swiftlet_mlx import Session, load
from swiftlet_mlx.events import Finish, TextDelta, ThinkingDelta


def ask(
    session: Session, question: str, on_text: Callable[[str], None], on_done: Callable[[str], None]
) -> threading.Thread:
    turn = session.send(question, max_tokens=60)

    def read() -> None:
        for event in turn:
            if isinstance(event, TextDelta):
                on_text(event.text)
            elif isinstance(event, ThinkingDelta):
                on_text("…")  # show that something happens, not what
            elif isinstance(event, Finish):
                on_done(event.reason)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def main(path: str) -> None:
    model, tokenizer = load(path)
    with Session(model, tokenizer) as session:
        reader = ask(session, "Tell me a story.", lambda t: print(t, end="", flush=True), lambda r: print(f"\n[{r}]"))
        print("[the window stays alive]")
        reader.join()


if __name__ == "__main__":
    main(sys.argv[1])
