"""Trains the built-in model's tokenizer: byte-level BPE whose digits, capitals and spaces stand alone.

So a word is the same tokens wherever it stands, and capitals are spelt letter by letter: that is what lets a
small model copy and upper-case words it has never seen.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tessera.engine.builtin.training.corpus import conversations
from tessera.engine.builtin.training.render import render

VOCAB_SIZE = 2560
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_SPLIT = Regex(r"\p{N}|\p{Lu}|\p{Ll}+|\p{L}|[^\s\p{L}\p{N}]+|\s")


def train(conversation_count: int = 60_000, seed: int = 7) -> Tokenizer:
    """A tokenizer trained on rendered training conversations; the same for the same arguments."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    markup = [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP_TOKENS),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=4,
    )
    texts = (
        "".join(text for text, _ in render(conversation))
        for conversation in islice(conversations(seed, "train"), conversation_count)
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(markup)
    return tokenizer


def write(folder: Path) -> Tokenizer:
    """Train and save tokenizer.json in `folder`."""
    tokenizer = train()
    tokenizer.save(str(folder / "tokenizer.json"))
    # One entry a line is what diffs and reviews want of a committed file.
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    return tokenizer
