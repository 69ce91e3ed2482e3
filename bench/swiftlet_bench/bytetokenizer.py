"""A byte-level tokenizer for models whose weights are random: any text goes in, every id comes out as something.

Knows the tokenizer files of Hugging Face; nothing of models.
"""

from __future__ import annotations

import json
from pathlib import Path


def add_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer with Qwen's special tokens; ids beyond the bytes decode to made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    table = {token: n for n, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    word = 0
    while len(table) < vocab:  # "Ġ" is how a byte-level vocabulary writes a leading space
        n, text = word, "Ġ"
        for _ in range(4):
            n, letter = divmod(n, 26)
            text += letters[letter]
        table[text] = len(table)
        word += 1
    inner = Tokenizer(models.BPE(vocab=table, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
