"""A byte-level tokenizer for models whose weights are random: any text goes in, every id comes out as something.

Knows the tokenizer files of Hugging Face; nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def add_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer with Qwen's special tokens; ids beyond the bytes decode to made-up words."""
    from tokenizers import pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    for word in range(vocab - len(SPECIALS) - len(tokens)):
        n, text = word, "Ġ"  # how a byte-level vocabulary writes a leading space
        for _ in range(4):
            n, letter = divmod(n, 26)
            text += _LETTERS[letter]
        tokens.append(text)
    write(folder, tokens)


def write(folder: Path, tokens: Sequence[str], newline: str = "\n") -> None:
    """The files of a byte-level tokenizer, with a small chat template and two end tokens.

    Args:
        folder: where to.
        tokens: all but the special ones, which come first.
        newline: what stands for one in the template; it must be in the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate([*SPECIALS, *tokens])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("\n", newline)
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
