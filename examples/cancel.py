"""Stopping an answer after a second, from another thread, and going on with the conversation.

python examples/cancel.py MODEL
"""

import sys
import threading

from swiftlet_mlx import Session, load


def main(path: str, seconds: float = 1.0) -> None:
    model, tokenizer = load(path)
    with Session(model, tokenizer) as session:
        timer = threading.Timer(seconds, session.cancel)
        timer.start()
        turn = session.send("Count to a thousand.", max_tokens=2000)
        for _ in turn:
            pass
        timer.cancel()
        assert turn.finish is not None
        print(f"[{turn.finish.reason}] {turn.text!r}")

        again = session.send("Count to ten instead.", max_tokens=20)
        for _ in again:
            pass
        assert again.statistics is not None
        print(f"[{again.statistics.cached_tokens} of {again.statistics.prompt_tokens} prompt tokens were cached]")


if __name__ == "__main__":
    main(sys.argv[1])
