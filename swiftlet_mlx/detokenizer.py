"""From token ids to text, exactly: what to show after each id, and which ids end a reply.

Knows tokenizers; no strings to stop at, no MLX, no threads. Invariant: the deltas of a Detokenizer join to
exactly what the tokenizer decodes from all the ids at once. Special tokens are never text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>")
"""Special tokens that never belong inside a reply, whichever ids a checkpoint's files list as ends. A model
that writes <|im_start|> has begun somebody else's turn."""


def end_ids(tokenizer: Any, stated: Iterable[int] = ()) -> frozenset[int]:
    """All ids that end a turn: the tokenizer's, the files', and the well-known ones the vocabulary has as
    special.

    Args:
        tokenizer: mlx-lm's wrapper or a bare Hugging Face tokenizer.
        stated: what the model's files say; see `defaults.stated_ends`.
    """
    ids = {*stated, *(getattr(tokenizer, "eos_token_ids", None) or ())}
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    special = set(tokenizer.all_special_tokens) | _added_special(tokenizer)
    return frozenset(ids | {tokenizer.convert_tokens_to_ids(name) for name in END_NAMES if name in special})


def _added_special(tokenizer: Any) -> set[str]:
    return {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}


class Detokenizer(Protocol):
    """Ids in, text out."""

    def add(self, token: int) -> str:
        """Take an id, return the text that is certain now."""

    def finish(self) -> str:
        """Return the rest: a character that was cut comes as U+FFFD."""


class Vocabulary:
    """What a tokenizer's ids stand for. Made once a tokenizer; read only.

    Args:
        tokenizer: mlx-lm's wrapper or a bare Hugging Face tokenizer.
        keep: special tokens that are markup to be read (tags of thoughts and tool calls), not to be dropped.
    """

    def __init__(self, tokenizer: Any, keep: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        kept = set(keep)
        names = set(self._tokenizer.all_special_tokens) | _added_special(self._tokenizer)
        self.hidden: frozenset[int] = frozenset(
            self._tokenizer.convert_tokens_to_ids(name) for name in names if name not in kept
        )
        self._bytes: list[bytes] | None = _byte_table(self._tokenizer)
        self._fallback = frozenset() if self._bytes is not None else _fallback_ids(self._tokenizer)

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one reply."""
        if self._bytes is not None:
            return _Bytes(self._bytes, self.hidden)
        return _Window(self.decode, self.hidden, self._fallback)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out, spaces as the model wrote them."""
        shown = [i for i in ids if i not in self.hidden]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token (special ones too: their name)."""
        if self._bytes is not None and token < len(self._bytes):
            return self._bytes[token]
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


class _Bytes:
    """For byte-level BPE: a token is bytes, so decoding is joining, and only cut characters wait."""

    def __init__(self, table: list[bytes], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        if token in self._hidden or not 0 <= token < len(self._table):
            return ""  # ids of a padded vocabulary have no text
        return self._decoder.decode(self._table[token])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """For any other tokenizer: decode a window of ids again and let out what no later id can change.

    The window keeps the ids of the last delta, since a token's text may depend on the one before it (leading
    spaces). A text that ends in U+FFFD may be a cut character and waits. So does a run of byte tokens, to its end:
    SentencePiece's byte fallback decodes a run as a whole, and one bad byte makes U+FFFD of all of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], hidden: frozenset[int], fallback: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._fallback = fallback
        self._ids: list[int] = []
        self._first = 0
        self._next = 0

    def add(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        if token in self._fallback:
            return ""
        before = self._decode(self._ids[self._first : self._next])
        text = self._decode(self._ids[self._first :])
        if text.endswith("\ufffd") or not text.startswith(before):
            return ""
        self._first, self._next = self._next, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        before = self._decode(self._ids[self._first : self._next])
        text = self._decode(self._ids[self._first :])
        self._first = self._next = len(self._ids)
        return text[len(before) :]


@lru_cache(maxsize=1)
def _char_bytes() -> dict[str, int]:
    """The printable characters that byte-level BPE writes bytes as (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in plain}
    rest = [b for b in range(256) if b not in table.values()]
    return table | {chr(256 + i): b for i, b in enumerate(rest)}


def _fallback_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of SentencePiece's single bytes, <0x00> to <0xFF>."""
    ids = (tokenizer.get_vocab().get(f"<0x{b:02X}>") for b in range(256))
    return frozenset(i for i in ids if i is not None)


def _byte_table(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every id, if this is byte-level BPE and nothing else touches the text; else None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return None
    decoder = json.loads(backend.to_str()).get("decoder")
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        return None
    chars = _char_bytes()
    table = []
    for name in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))):
        # As the tokenizers library does it: one character outside the table makes the whole token plain
        # UTF-8.
        known = name is not None and all(c in chars for c in name)
        table.append(bytes(chars[c] for c in name) if known else (name or "").encode())
    return table
