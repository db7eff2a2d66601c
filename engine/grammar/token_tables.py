"""Sets of tokens as masks: what the sequences of one request share of its allowed ids and bad words."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.contract.sampling_params import SamplingParams

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]  # bit id % 32 of word id // 32 stands for a token

TOKEN_BYTES = array("i").itemsize
MAX_KNOWN_SETS = 64  # that the sequences of a request share; each has as many bits as the vocabulary


class TokenTables:
    """The tokens that a request's parameters allow and forbid, worked out once for all of its sequences.

    Attributes:
        allowed: [ceil(vocab_size / 32)]
        forbidden: [ceil(vocab_size / 32)]; bad words of one token.
        end_of_reasoning: [ceil(vocab_size / 32)]; what ends it, where there is a budget of it; else nothing.
        longer_words: the other bad words by their last token but one: the bytes of all but the last, and the last.
        longest_beginning: most bytes of a bad word before its last token.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        allowed, words, budget = params.allowed_token_ids, params.bad_words, params.reasoning_budget
        self.vocab_size = vocab_size
        self.allowed = every_token(vocab_size) if allowed is None else token_words(allowed, vocab_size)
        self.forbidden = token_words([word[0] for word in words if len(word) == 1], vocab_size)
        self.end_of_reasoning = token_words([] if budget is None else [budget.end_token_id], vocab_size)
        self.longer_words: dict[int, list[tuple[bytes, int]]] = {}
        for word in words:
            if len(word) > 1:
                self.longer_words.setdefault(word[-2], []).append((token_bytes(word[:-1]), word[-1]))
        self.longest_beginning = max((TOKEN_BYTES * (len(word) - 1) for word in words), default=0)
        self._permitted = self.allowed & ~self.forbidden
        self._permitted.flags.writeable = False  # the mask of many sequences
        self._known: dict[tuple[int, ...], Words] = {}

    def words(self, token_ids: tuple[int, ...]) -> Words:
        """A set of ids as `token_words`, made once for all sequences that ask for it soon."""
        found = self._known.get(token_ids)
        if found is None:
            if len(self._known) >= MAX_KNOWN_SETS:
                self._known.clear()
            found = self._known[token_ids] = token_words(token_ids, self.vocab_size)
            found.flags.writeable = False
        return found

    def without(self, allowed: Words, forbidden: Words) -> Words:
        """`allowed` but for `forbidden`; it may be all sequences'."""
        if allowed is self.allowed and forbidden is self.forbidden:
            return self._permitted
        return allowed & ~forbidden


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Ids in a form of which hundreds are compared at once."""
    return array("i", token_ids).tobytes()


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
