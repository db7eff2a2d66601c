"""Sets of tokens as masks: what the sequences of one request share of its allowed ids and bad words."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from tessera.engine.contract.sampling_params import SamplingParams

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]  # bit id % 32 of word id // 32 stands for a token

NONE_BEGUN = -1
TOKEN_BYTES = array("i").itemsize
MAX_KNOWN_SETS = 64  # that the sequences of a request share; each has as many bits as the vocabulary


class TokenTables:
    """The tokens that a request's parameters allow and forbid, worked out once for all of its sequences.

    Attributes:
        allowed: [ceil(vocab_size / 32)]
        forbidden: [ceil(vocab_size / 32)]; bad words of one token.
        end_of_reasoning: [ceil(vocab_size / 32)]; what ends it, where there is a budget of it; else nothing.
        bad_words: the longer ones.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        allowed, words, budget = params.allowed_token_ids, params.bad_words, params.reasoning_budget
        self.vocab_size = vocab_size
        self.allowed = every_token(vocab_size) if allowed is None else token_words(allowed, vocab_size)
        self.forbidden = token_words([word[0] for word in words if len(word) == 1], vocab_size)
        self.end_of_reasoning = token_words([] if budget is None else [budget.end_token_id], vocab_size)
        self._usually = self.allowed & ~self.forbidden
        self._usually.flags.writeable = False  # the mask of many sequences
        self._permitted: WeakValueDictionary[int, Words] = WeakValueDictionary({NONE_BEGUN: self._usually})
        self.bad_words = LongerBadWords(words)
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

    def permitted(self, allowed: Words, begun: int) -> Words:
        """`allowed` but for what completes a bad word, of which the longest that has begun is `begun`.

        It may be all sequences': see `LongerBadWords`.
        """
        if allowed is not self.allowed:
            return self._without_last_tokens(allowed & ~self.forbidden, begun)
        found = self._permitted.get(begun)
        if found is None:
            found = self._permitted[begun] = self._without_last_tokens(self._usually.copy(), begun)
            found.flags.writeable = False
        return found

    def _without_last_tokens(self, words: Words, begun: int) -> Words:
        if begun != NONE_BEGUN:
            places, bits = self.bad_words.last_tokens(begun)
            words[places] &= ~bits
        return words


class LongerBadWords:
    """Bad words of two tokens or more: which are complete but for their last token.

    Their beginnings are kept backwards and in order: those that a text ends with are one's own beginnings. The text,
    backwards, comes right behind the longest of them and those that start with it.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        lasts: dict[bytes, list[int]] = {}
        for word in words:
            if len(word) > 1:
                lasts.setdefault(token_bytes(word[-2::-1]), []).append(word[-1])
        self._backwards = sorted(lasts)
        self._lasts = [lasts[each] for each in self._backwards]
        self._chains: list[tuple[int, ...]] = []  # of each: which it starts with, from the shortest to itself
        for number, each in enumerate(self._backwards):
            chain = self._chains[-1] if number else ()
            while chain and not each.startswith(self._backwards[chain[-1]]):
                chain = chain[:-1]
            self._chains.append((*chain, number))
        self._last_tokens: list[tuple[Words, Words] | None] = [None] * len(self._backwards)
        self.longest = max(map(len, self._backwards), default=0)  # bytes that decide

    def longest_begun(self, recent: bytes) -> int:
        """The number of the longest beginning that a text ends with; `recent` is its end, backwards."""
        before = bisect_right(self._backwards, recent) - 1
        if before < 0:
            return NONE_BEGUN
        chain = self._chains[before]
        num_begun = bisect_left(chain, True, key=lambda number: not recent.startswith(self._backwards[number]))
        return chain[num_begun - 1] if num_begun else NONE_BEGUN

    def last_tokens(self, begun: int) -> tuple[Words, Words]:
        """The last tokens of all words that have begun, of which this is the longest, as words that are not 0: where
        each is, and what it is."""
        found = self._last_tokens[begun]
        if found is None:
            token_ids = np.array([last for number in self._chains[begun] for last in self._lasts[number]], np.uint32)
            places, inverse = np.unique(token_ids >> 5, return_inverse=True)
            bits = np.zeros(len(places), np.uint32)
            np.bitwise_or.at(bits, inverse, np.uint32(1) << (token_ids & 31))
            found = self._last_tokens[begun] = (places, bits)
        return found


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
