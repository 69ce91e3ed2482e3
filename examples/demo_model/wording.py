"""Turns one way of asking into many: other frames, small words more or less, how people type.

Knows English function words and frames. Does not know what a question is about; the same frames surround what the model
knows and what it must refuse, so that a frame tells it nothing.
Invariant: placeholders and content words survive; a wording of the evaluation is never produced (`Wording.held`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

from phrases import CODAS, DO, EXPLAIN, FUNCTION_WORDS, INTRO, JUNK, KNOW, ONSETS, OUTRO, VOWELS


def normal(text: str) -> str:
    """For comparing wordings: lower case, letters and placeholders only."""
    return " ".join(re.sub(r"[^\w{}+*\-/ ]", " ", text.lower()).split())


def lower_first(text: str) -> str:
    """Without the capital that opens a sentence; "I" keeps its own."""
    return text if text.startswith(("I ", "I'", "{")) else text[:1].lower() + text[1:]


_IS = r"^(What|Who|Where)(?: is|'s) ((?:the|a|an|your|my|its|{|[A-Z-])[^?]*?)( called| like| good for| for)?\?$"
_DOES = r"^(What|How|Where|Why|When|Who) does (.+) (do|mean|work|come from|lie|belong to|use|have|cost|contain|show)\?$"
# A question, and what it becomes inside another sentence.
_EMBED: list[tuple[re.Pattern[str], str]] = [
    (re.compile(_IS), r"\1 \2 is\3"),
    (re.compile(r"^(What|Who|Where) are ([^?]+)\?$"), r"\1 \2 are"),
    (re.compile(_DOES), r"\1 \2 \3s"),
    (re.compile(r"^How do I ([^?]+)\?$"), r"how to \1"),
    (re.compile(r"^(How|What|Which|Where|Why) (?:can|do) (I|you|they|people) ([^?]+)\?$"), r"\1 \2 \3"),
    (re.compile(r"^((?:What|Which|Who|In which|On which|How many|How much) [^?]+)\?$"), r"\1"),
]


class Wording:
    """Rewords questions, never into one that the evaluation holds back."""

    def __init__(self, held: Iterable[str]) -> None:
        self.held = frozenset(normal(text) for text in held)

    def reword(self, rng: random.Random, question: str, *, strength: float = 1.0) -> str:
        """Another wording of `question`, which may hold placeholders in braces.

        Args:
            rng: where chance comes from.
            question: one sentence.
            strength: 0 leaves it as it is; 1 rewords about three in four.
        """
        for _ in range(20):
            text = self._once(rng, question, strength)
            if normal(text) not in self.held:
                return text
        return question

    def _once(self, rng: random.Random, question: str, strength: float) -> str:
        text = question
        if rng.random() < 0.3 * strength:
            text = self._embed(rng, text)
        if rng.random() < 0.22 * strength:
            text = self._noise(rng, text)
        if rng.random() < 0.22 * strength:
            text = f"{rng.choice(INTRO)} {lower_first(text)}"
        if rng.random() < 0.2 * strength:
            outro = rng.choice(OUTRO)
            end = text[-1] if text[-1:] in "?.!" else ""
            text = (
                f"{text} {outro}"
                if outro[0].isupper()
                else f"{text.rstrip('?.!')}{rng.choice((' ', ', '))}{outro}{end}"
            )
        return text

    def _embed(self, rng: random.Random, text: str) -> str:
        end = rng.choice(("?", ".", "?", ""))
        if (found := re.match(r"^How do I ([^?]+)\?$", text)) and rng.random() < 0.8:
            return f"{rng.choice(DO)} {found[1]}{end}"
        if (found := re.match(r"^What(?: is|'s|'re| are) ([^?]+)\?$", text)) and rng.random() < 0.4:
            return f"{rng.choice(EXPLAIN)} {found[1]}{end}"
        for pattern, replacement in _EMBED:
            if pattern.match(text):
                inner = lower_first(pattern.sub(replacement, text)).replace(" dos", " does")
                return f"{rng.choice(KNOW)} {inner}{end}"
        return text

    def _noise(self, rng: random.Random, text: str) -> str:
        """Small words get lost, others slip in; words with a meaning stay."""
        words = []
        for word in text.split(" "):
            small = word.strip("?.!,").lower() in FUNCTION_WORDS
            if small and rng.random() < 0.15:
                continue
            if small and rng.random() < 0.12:
                word = rng.choice(JUNK)
            if rng.random() < 0.1:
                words.append(rng.choice(JUNK) if rng.random() < 0.85 else invented_word(rng))
            words.append(word)
        return " ".join(words) or text


def invented_word(rng: random.Random) -> str:
    """One to three syllables that mean nothing, or rarely something by accident."""
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((1, 2, 2, 3))))
