"""Sets of tokens as masks: what the sequences of one request share of its allowed ids and bad words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.contract.sampling_params import SamplingParams

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]  # bit id % 32 of word id // 32 stands for a token


class TokenTables:
    """The tokens that a request's parameters allow and forbid, worked out once for all of its sequences.

    Attributes:
        allowed: [ceil(vocab_size / 32)]
        forbidden: [ceil(vocab_size / 32)]; bad words of one token.
        longer_words: the other bad words, each as all but its last token, and the last.
        longest_beginning: most tokens of a bad word before its last.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        allowed, words = params.allowed_token_ids, params.bad_words
        self.vocab_size = vocab_size
        self.allowed = every_token(vocab_size) if allowed is None else token_words(allowed, vocab_size)
        self.forbidden = token_words([word[0] for word in words if len(word) == 1], vocab_size)
        self.longer_words = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self.longest_beginning = max((len(before) for before, _ in self.longer_words), default=0)


def token_words(token_ids: Sequence[int], vocab_size: int) -> Words:
    """A set of ids as words of 32 bits: bit id % 32 of word id // 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[np.array(token_ids, np.intp)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def every_token(vocab_size: int) -> Words:
    """All ids of the vocabulary as words."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[:vocab_size] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)
