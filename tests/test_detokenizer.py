"""Deltas join to exactly what the tokenizer decodes, and every end of a turn is known."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from talkers import SPECIAL, tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from swiftlet_mlx.detokenizer import Vocabulary, end_ids

TOKENIZER = tokenizer()
VOCABULARY = Vocabulary(TOKENIZER, keep=["<think>", "</think>"])


def spm(strip: bool) -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer with byte fallback, as Mixtral's."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁hello",
        "▁world",
        "wor",
        "ld",
        "é",
        ".",
    ]
    inner = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def joined(vocabulary: Vocabulary, ids: list[int]) -> str:
    detokenizer = vocabulary.detokenizer()
    return "".join(detokenizer.add(i) for i in ids) + detokenizer.finish()


def decoded(inner: Any, ids: list[int]) -> str:
    return str(inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


TEXTS = [
    "A👍🏽!",
    "漢字かな",
    "x\0y",
    " hello world",
    "",
    "👨‍👩‍👧‍👦 🇨🇭",
    "naïve café\r\n\ttab",
    "a" * 50,
    "   three spaces",
    "\n\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was_encoded(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert joined(VOCABULARY, ids) == text == decoded(TOKENIZER, ids)


@given(st.lists(st.integers(0, 383), max_size=40))
def test_any_ids_join_to_what_decode_gives(ids: list[int]) -> None:
    known = [i for i in ids if i < len(TOKENIZER)]
    assert joined(VOCABULARY, ids) == decoded(TOKENIZER, known)


@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece_ids_join_to_what_decode_gives(strip: bool) -> None:
    inner = spm(strip)
    vocabulary = Vocabulary(inner)
    draw = random.Random(5)
    for _ in range(200):
        ids = [draw.choice([*range(1, 3), *range(259, 266), 3 + 0xE4, 3 + 0xB8, 3 + 0xAD, 3 + 0x41]) for _ in range(12)]
        assert joined(vocabulary, ids) == decoded(inner, ids)


def test_a_cut_character_waits_and_is_flushed_at_the_end() -> None:
    ids = TOKENIZER.encode("ok👍", add_special_tokens=False)
    detokenizer = VOCABULARY.detokenizer()
    shown = "".join(detokenizer.add(i) for i in ids[:-1])
    assert shown == "ok"
    assert detokenizer.finish() == decoded(TOKENIZER, ids[:-1])[2:] == "\ufffd"


def test_a_character_comes_out_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("👍", add_special_tokens=False)
    detokenizer = VOCABULARY.detokenizer()
    assert [detokenizer.add(i) for i in ids] == [""] * (len(ids) - 1) + ["👍"]


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tokens_are_never_text(name: str) -> None:
    ids = [*TOKENIZER.encode("done"), TOKENIZER.convert_tokens_to_ids(name), *TOKENIZER.encode("x")]
    assert joined(VOCABULARY, ids) == "donex"


def test_tags_that_are_special_tokens_can_be_kept() -> None:
    inner = tokenizer()
    inner.add_special_tokens({"additional_special_tokens": ["<think>"]})
    think = inner.convert_tokens_to_ids("<think>")
    assert joined(Vocabulary(inner, keep=["<think>"]), [think]) == "<think>"
    assert joined(Vocabulary(inner), [think]) == ""


def test_token_bytes_are_exact_where_the_text_is_half_a_character() -> None:
    ids = TOKENIZER.encode("👍", add_special_tokens=False)
    assert b"".join(VOCABULARY.token_bytes(i) for i in ids) == "👍".encode()


def test_end_ids_are_those_of_the_files_and_of_the_tokenizer() -> None:
    named = {TOKENIZER.convert_tokens_to_ids(n) for n in SPECIAL}
    assert end_ids(TOKENIZER, {7, 8}) == named | {7, 8}


def test_every_end_token_of_mlx_lm_s_wrapper_counts() -> None:
    inner = tokenizer()._tokenizer
    wrapped = TokenizerWrapper(inner, eos_token_ids=[5, 7])
    assert {5, 7, inner.eos_token_id} <= end_ids(wrapped)


def test_an_end_token_nobody_lists_is_still_an_end() -> None:
    inner = tokenizer(eos="<|im_end|>")
    assert inner.convert_tokens_to_ids("<|endoftext|>") in end_ids(inner)


def test_plain_words_are_no_end_tokens() -> None:
    assert not set(TOKENIZER.encode("the end")) & end_ids(TOKENIZER)
