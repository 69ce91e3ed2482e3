"""A byte-level BPE tokenizer in Qwen's manner, trained on the corpus.

Knows Qwen's way of splitting text and its special tokens. Does not know the model.
Invariant: every text round-trips, whatever it holds, because all 256 bytes are in the vocabulary.

    python tokenizer.py --output DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from chat_format import CHAT_TEMPLATE, PLAIN_TOKENS, SPECIAL_TOKENS, render
from corpus import training_set
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 4096
# As Qwen's tokenizers split: contractions, words with what precedes them, digits, punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(seed: int, count: int) -> Iterator[str]:
    """Ordinary text of the corpus, without the tokens that are added."""
    for conversation in training_set(seed, count):
        text = "".join(piece for piece, _ in render(conversation, think=True))
        for token in (*SPECIAL_TOKENS, *PLAIN_TOKENS):
            text = text.replace(token, "\0")
        yield from text.split("\0")


def train(seed: int, count: int) -> Tokenizer:
    """Trains on `count` conversations.

    Args:
        seed: of the conversations.
        count: how many of them.

    Returns:
        A tokenizer with at most `VOCAB_SIZE` entries, the added tokens last.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(PLAIN_TOKENS),
        min_frequency=4,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed, count), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer, its template and the generation settings in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": 4096,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token in (*SPECIAL_TOKENS, *PLAIN_TOKENS)
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos[1]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=100_000)
    arguments = parser.parse_args()
    tokenizer = train(arguments.seed, arguments.conversations)
    save(tokenizer, arguments.output)
    print(f"{tokenizer.get_vocab_size()} entries in {arguments.output}")


if __name__ == "__main__":
    main()
