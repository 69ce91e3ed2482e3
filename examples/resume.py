"""A conversation that outlives the program: saved with its caches, opened again without reading anything twice.

python examples/resume.py MODEL FILE
"""

import sys
from pathlib import Path

from swiftlet_mlx import Session, load


def main(path: str, file: str) -> None:
    model, tokenizer = load(path)
    if Path(file).exists():
        session = Session.load(file, model, tokenizer)
        print(f"[{len(session.messages)} messages so far]")
    else:
        session = Session(model, tokenizer, system="You are a patient teacher.")
    with session:
        turn = session.send("Go on.", max_tokens=30, temperature=0)
        for _ in turn:
            pass
        assert turn.statistics is not None
        print(turn.text)
        print(f"[{turn.statistics.prompt_tokens - turn.statistics.cached_tokens} tokens had to be read]")
        session.save(file)


if __name__ == "__main__":
    main(*sys.argv[1:3])
