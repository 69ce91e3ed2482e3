"""A conversation inside a program: two questions, the answers as they come, then the figures.

python examples/embed.py MODEL
"""

import sys

from swiftlet_mlx import Session, load
from swiftlet_mlx.events import Statistics, TextDelta


def main(path: str) -> None:
    model, tokenizer = load(path)
    with Session(model, tokenizer, system="Answer in one sentence.") as session:
        for question in ("What is the capital of Spain?", "And of France?"):
            for event in session.send(question, max_tokens=60, temperature=0):
                if isinstance(event, TextDelta):
                    print(event.text, end="", flush=True)
                elif isinstance(event, Statistics):
                    print(f"\n[{event.generated_tokens} tokens, {event.cached_tokens} of the prompt were cached]")


if __name__ == "__main__":
    main(sys.argv[1])
