"""Byte-level BPE tokenizer of the demo model, made for copying.

The pre-tokenizer cuts at the borders of letters, digits and everything else, so that a space
never joins a word. A word therefore has the same tokens in a question, in JSON and in a file
name, and copying it means repeating tokens; every digit is a token of its own. Rare merges are
left out and tokens are short, which splits made-up words into pieces that were all seen often.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import narrow
from chat import pieces
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2560
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
"""Ids 0 to 8, in this order."""
PATTERN = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"


def train_tokenizer(seed: int = 7, num_dialogues: int = 6000) -> Tokenizer:
    """The tokenizer of the narrow corpus; the defaults give the shipped one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=14,
        min_frequency=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_dialogues), trainer)
    return tokenizer


def _texts(seed: int, num_dialogues: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(num_dialogues):
        yield "".join(text for text, _ in pieces(narrow.dialogue(rng)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--dialogues", type=int, default=6000)
    options = parser.parse_args()
    tokenizer = train_tokenizer(options.seed, options.dialogues)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out))
    print(f"{tokenizer.get_vocab_size()} tokens in {options.out}")


if __name__ == "__main__":
    main()
