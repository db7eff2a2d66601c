"""A model's tokens as the metadata list them, and which of them are special."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from tessera.engine.gguf.metadata import Metadata

Array = np.ndarray[Any, Any]

MAX_TOKENS = 2**22
TOKENS_KEY, TYPES_KEY = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"

# Control tokens after which a model has said all, by their text: files name one of them at most
# (llama.cpp, llama-vocab.cpp, special_eog_ids).
END_TOKENS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
}
# Where a model has these, `<|end|>` ends one of several messages.
HARMONY_TOKENS = {"<|return|>", "<|call|>"}
# Of Gemma 1 and 2, by id: files of before July 2024 have them as normal tokens (llama.cpp, pull request 8244).
TURN_TOKENS = {106: "<start_of_turn>", 107: "<end_of_turn>"}


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """`types` has the TokenType of each of `tokens` as a plain number."""

    tokens: list[str]
    types: list[int]

    def of_types(self, *types: TokenType) -> Iterable[int]:
        """Ids of the tokens of these types, ascending."""
        wanted = frozenset(types)
        return (token_id for token_id, type in enumerate(self.types) if type in wanted)


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Raises: ModelError naming the key at fault."""
    tokens = metadata.strings(TOKENS_KEY, MAX_TOKENS)
    return Vocabulary(tokens, _token_types(metadata, len(tokens)).tolist())


def _token_types(metadata: Metadata, size: int) -> Array:
    """[size] integers"""
    types = metadata.integers(TYPES_KEY) if metadata.has(TYPES_KEY) else np.full(size, TokenType.NORMAL)
    if len(types) != size:
        metadata.refuse(TYPES_KEY, f"an array of {size}, one for each token")
    if metadata.string("general.architecture", "") in ("gemma", "gemma2"):
        turns = metadata.some_strings(TOKENS_KEY, TURN_TOKENS).items() & TURN_TOKENS.items()
        types = types.copy()
        types[[token_id for token_id, _ in turns]] = TokenType.CONTROL
    return types


def special_token_id(metadata: Metadata, name: str, vocab_size: int) -> int | None:
    """The id at tokenizer.ggml.`name`_token_id; None where the file has none, or one beyond the vocabulary."""
    found = metadata.scalar(f"tokenizer.ggml.{name}_token_id")
    fits = isinstance(found, int) and not isinstance(found, bool) and 0 <= found < vocab_size
    return int(found) if fits and found is not None else None


def stop_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Ids after which a completion ends, ascending; none where the file has no tokens."""
    if not metadata.has(TOKENS_KEY):
        return ()
    size = metadata.length(TOKENS_KEY)
    named = (special_token_id(metadata, name, size) for name in ("eos", "eot", "eom"))
    found = {token_id for token_id in named if token_id is not None}
    types = _token_types(metadata, size)
    special = np.flatnonzero((types == TokenType.CONTROL) | (types == TokenType.USER_DEFINED)).tolist()
    ends = {
        token: token_id for token_id, token in metadata.some_strings(TOKENS_KEY, special).items() if token in END_TOKENS
    }
    if ends.keys() >= HARMONY_TOKENS:
        ends.pop("<|end|>", None)
    return tuple(sorted(found | set(ends.values())))
