"""Token masks of a sequence: allowed ids, bad words and a grammar."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.grammar.compiler import CompiledGrammar, GrammarCompiler, Words


class BadWords:
    """Forbidden sequences of tokens: the last of each is masked once the others have been chosen.

    Attributes:
        forbidden: [ceil(vocab_size / 32)]; the tokens that cannot come next.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._always = token_words([word[0] for word in words if len(word) == 1], vocab_size)
        self._longer = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._recent: deque[int] = deque(maxlen=max((len(word) - 1 for word in words), default=0))
        self.forbidden = self._always

    def consume(self, token_id: int) -> None:
        """Advance past the token that was chosen."""
        if not self._longer:
            return
        self._recent.append(token_id)
        recent = list(self._recent)
        last = [last for before, last in self._longer if recent[-len(before) :] == before]
        self.forbidden = self._always | token_words(last, self._vocab_size) if last else self._always


class TokenConstraint:
    """The allowed ids of a request, without those that would complete one of its bad words.

    Attributes:
        mask: [ceil(vocab_size / 32)]; the tokens that may come next.
        is_complete: nothing but the end can follow.
        error: why the sequence cannot go on, or None.
        param: the request field that constrains it, for errors.
    """

    is_complete = False
    error: str | None = None

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        allowed = params.allowed_token_ids
        self.param = "bad_words" if allowed is None else "allowed_token_ids"
        self._allowed = every_token(vocab_size) if allowed is None else token_words(allowed, vocab_size)
        self._bad_words = BadWords(params.bad_words, vocab_size)
        self.mask = self._allowed & ~self._bad_words.forbidden

    def consume(self, token_id: int) -> bool:
        """Advance past a token; -> whether a grammar's mask must be computed and applied before the next."""
        self._bad_words.consume(token_id)
        self.mask = self._allowed & ~self._bad_words.forbidden
        return False


class GrammarConstraint(TokenConstraint):
    """A grammar in the state after a sequence's tokens.

    While the grammar waits for its start token, the sequence cannot end. Where the first token decides whether it
    waits, the mask allows both.
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
        if params.ignore_eos:
            self._allowed = self._allowed & ~self._ends
        self._first_mask = compiled.first_mask
        self.matcher = compiled.matcher.deep_copy()
        self._start_token_id = grammar.start_token_id
        self._section_token_id = grammar.section_token_id
        # The mask while the grammar waits for its start token.
        self._before = self._allowed & ~(self._ends | token_words(params.stop_token_ids, vocab_size))
        if self._section_token_id is not None:
            self.apply_mask(self._first_mask)
            section = token_words([self._section_token_id], vocab_size)
            self.mask |= section & self._before & ~self._bad_words.forbidden
        elif self._start_token_id is not None:
            self.mask = self._before & ~self._bad_words.forbidden
        else:
            self.apply_mask(self._first_mask)
        if self.error is not None or not self.mask.any():
            raise InvalidRequestError(self._dead_end(), param=self.param)

    def consume(self, token_id: int) -> bool:
        """See TokenConstraint; sets `error` if the grammar cannot go on."""
        self._bad_words.consume(token_id)
        if self._section_token_id is not None:
            if token_id != self._section_token_id:
                self._start_token_id = None
            self._section_token_id = None
            self.is_complete = False
        if self._start_token_id is not None:
            if token_id == self._start_token_id:
                self._start_token_id = None
                self.apply_mask(self._first_mask)
            else:
                self.mask = self._before & ~self._bad_words.forbidden
            return False
        if not self.matcher.consume_token(token_id):
            self.error = self._too_complex()
        elif self.matcher.is_stopped():
            self.is_complete = True
        else:
            return True
        return False

    def apply_mask(self, words: Words) -> None:
        """Set the mask from the grammar's own, whose vocabulary may be larger."""
        mask = self.mask = words[: len(self._allowed)] & self._allowed & ~self._bad_words.forbidden
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
    constraints: Sequence[TokenConstraint], token_ids: Sequence[int], compiler: GrammarCompiler | None
) -> None:
    """Advance each constraint past its sequence's token; without a compiler there are no grammars."""
    moved = [each for each, token_id in zip(constraints, token_ids, strict=True) if each.consume(token_id)]
    waiting = [each for each in moved if isinstance(each, GrammarConstraint)]
    if waiting and compiler is not None:
        masks = compiler.fill_masks([each.matcher for each in waiting])
        for row, each in enumerate(waiting):
            each.apply_mask(masks[row])


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
