"""Which tokens a sequence may choose: those that its grammar lets follow, of the ids that its request allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammar import CompiledGrammar, GrammarCompiler, Words
from engine.sampling_params import SamplingParams


class TokenConstraint:
    """The ids that a request allows, the same for every token.

    Attributes:
        mask: [ceil(vocab_size / 32)]; the tokens that may come next.
        is_complete: nothing but the end can follow.
        error: why the sequence cannot go on, or None.
        param: the request field that constrains it, for errors.
    """

    is_complete = False
    error: str | None = None
    param = "allowed_token_ids"

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        allowed = params.allowed_token_ids
        self.mask = every_token(vocab_size) if allowed is None else token_words(allowed, vocab_size)


class GrammarConstraint(TokenConstraint):
    """A grammar in the state that a sequence's tokens have brought it to.

    Where the grammar holds from a later token on, the sequence cannot end before.
    """

    def __init__(
        self, params: SamplingParams, compiled: CompiledGrammar, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Raises: InvalidRequestError if no token can come first."""
        super().__init__(params, vocab_size)
        grammar = params.grammar
        assert grammar is not None, "a constraint by a grammar has one"
        self.param = grammar.param
        self._ends = token_words(eos_token_ids, vocab_size)
        self._limit = self.mask & ~self._ends if params.ignore_eos else self.mask
        self._first_mask = compiled.first_mask
        self.matcher = compiled.matcher.deep_copy()
        self._start_token_id = grammar.start_token_id
        if self._start_token_id is None:
            self.take(self._first_mask)
        else:
            self.mask = self._limit & ~(self._ends | token_words(params.stop_token_ids, vocab_size))
        if self.error is not None or not self.mask.any():
            raise InvalidRequestError(self._dead_end(), param=self.param)

    def consume(self, token_id: int) -> bool:
        """Go past a token; -> whether `mask` is to be computed and taken before the next."""
        if self._start_token_id is not None:
            if token_id == self._start_token_id:
                self._start_token_id = None
                self.take(self._first_mask)
            return False
        if not self.matcher.consume_token(token_id):
            self.error = self._too_complex()
        elif self.matcher.is_stopped():
            self.is_complete = True
        else:
            return True
        return False

    def take(self, words: Words) -> None:
        """Make what the grammar lets follow, whose vocabulary may be the larger, the new mask."""
        mask = self.mask = words[: len(self._limit)] & self._limit
        if self.matcher.is_error():
            self.error = self._too_complex()
        elif not (mask & ~self._ends).any():
            self.is_complete = self.matcher.is_accepting()
            self.error = None if self.is_complete else self._dead_end()

    def _too_complex(self) -> str:
        return f"the grammar of {self.param} became too complex to follow"

    def _dead_end(self) -> str:
        return f"no token can follow that satisfies {self.param} and the request's other fields together"


def advance_constraints(
    constraints: Sequence[GrammarConstraint], token_ids: Sequence[int], compiler: GrammarCompiler
) -> None:
    """Take each constraint past the token that its sequence chose."""
    waiting = [each for each, token_id in zip(constraints, token_ids, strict=True) if each.consume(token_id)]
    if waiting:
        masks = compiler.fill_masks([each.matcher for each in waiting])
        for each, words in zip(waiting, masks, strict=True):
            each.take(words)


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
