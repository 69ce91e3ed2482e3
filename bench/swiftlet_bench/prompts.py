"""Prompts of any length, the same on every machine: sentences for models with a tokenizer, ids for others.

Knows no model. Invariant: `(kind, tokens, seed)` decides every id; a longer prompt does not begin like a shorter one
of another seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

_WHO = (
    "the miller", "a tired pilot", "her brother", "the committee", "every child", "an old clerk", "the night shift",
    "our neighbour", "a botanist", "the second violin", "nobody", "the ferry", "a small dog", "the translator",
)  # fmt: skip
_DID = (
    "counted", "repaired", "forgot", "described", "sold", "measured", "painted", "refused", "followed", "wrote down",
    "carried", "searched for", "borrowed", "explained",
)  # fmt: skip
_WHAT = (
    "seven clay jars", "the map of the harbour", "a broken clock", "two letters", "the price of wheat", "an equation",
    "the name of the river", "a red umbrella", "forty sheep", "the last page", "a quiet song", "the northern road",
    "an empty theatre", "the recipe for bread",
)  # fmt: skip
_WHERE = (
    "before sunrise", "behind the station", "in the third year of the drought", "while it rained", "for the museum",
    "under the stairs", "without a word", "as the law required", "near the bridge", "on a Tuesday", "twice",
    "in front of everyone", "despite the noise", "with great care",
)  # fmt: skip


def text(words: int, seed: int = 0) -> str:
    """At least so many words of plain sentences."""
    rng, out, count = random.Random(seed), [], 0
    while count < words:
        sentence = " ".join(rng.choice(part) for part in (_WHO, _DID, _WHAT, _WHERE))
        out.append(sentence[0].upper() + sentence[1:] + ".")
        count += len(sentence.split())
    return " ".join(out)


def ids(n: int, vocab: int, tokenizer: Any = None, seed: int = 0) -> list[int]:
    """Token ids of a prompt.

    Args:
        n: How many.
        vocab: Size of the model's vocabulary.
        tokenizer: To make them from sentences; None draws them at random, which suits random weights.
        seed: Which of many prompts.
    """
    if tokenizer is None:
        rng = random.Random(seed)
        return [rng.randrange(vocab) for _ in range(n)]
    found: list[int] = list(tokenizer.encode(text(n, seed)))  # a word is at least one token
    return found[:n]


def digest(prompt: Sequence[int]) -> str:
    """A short name for a prompt, to tell whether two runs had the same."""
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()[:12]
