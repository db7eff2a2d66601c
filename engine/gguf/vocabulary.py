"""A model's tokens as the metadata list them, and which of them are special."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from tessera.engine.gguf.metadata import Metadata

MAX_TOKENS = 2**22

# Control tokens after which a model has said all, by their text: files name one of them at most
# (llama.cpp, llama-vocab.cpp, special_eog_ids).
END_TOKENS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
}
# Where a model has these, `<|end|>` ends one of several messages.
HARMONY_TOKENS = {"<|return|>", "<|call|>"}


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
        return (token_id for token_id, type in enumerate(self.types) if type in types)


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Raises: ModelError naming the key at fault."""
    tokens = metadata.strings("tokenizer.ggml.tokens", MAX_TOKENS)
    key = "tokenizer.ggml.token_type"
    if not metadata.has(key):
        return Vocabulary(tokens, [TokenType.NORMAL] * len(tokens))
    types = metadata.integers(key)
    if len(types) != len(tokens):
        metadata.refuse(key, f"an array of {len(tokens)}, one for each token")
    return Vocabulary(tokens, types.tolist())


def special_token_id(metadata: Metadata, name: str, vocab_size: int) -> int | None:
    """The id at tokenizer.ggml.`name`_token_id; None where the file has none, or one beyond the vocabulary."""
    found = metadata.scalar(f"tokenizer.ggml.{name}_token_id")
    fits = isinstance(found, int) and not isinstance(found, bool) and 0 <= found < vocab_size
    return int(found) if fits and found is not None else None


def stop_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Ids after which a completion ends, ascending; none where the file has no tokens."""
    if not metadata.has("tokenizer.ggml.tokens"):
        return ()
    vocabulary = read_vocabulary(metadata)
    named = (special_token_id(metadata, name, len(vocabulary.tokens)) for name in ("eos", "eot", "eom"))
    found = {token_id for token_id in named if token_id is not None}
    special = vocabulary.of_types(TokenType.CONTROL, TokenType.USER_DEFINED)
    ends = {vocabulary.tokens[token_id]: token_id for token_id in special if vocabulary.tokens[token_id] in END_TOKENS}
    if ends.keys() >= HARMONY_TOKENS:
        ends.pop("<|end|>", None)
    return tuple(sorted(found | set(ends.values())))
