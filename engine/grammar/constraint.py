"""Which tokens a sequence may choose: those that its grammar lets follow, of the ids that its request allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.grammar.compiler import CompiledGrammar, GrammarCompiler, Words


class BadWords:
    """Sequences of tokens that may not come: the last of each is forbidden where the others have just been chosen.

    Attributes:
        forbidden: [ceil(vocab_size / 32)]; what may not come next.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._always = token_words([word[0] for word in words if len(word) == 1], vocab_size)
        self._longer = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._recent: deque[int] = deque(maxlen=max((len(word) - 1 for word in words), default=0))
        self.forbidden = self._always

    def consume(self, token_id: int) -> None:
        """Go past a token that was chosen."""
        if not self._longer:
            return
        self._recent.append(token_id)
        recent = list(self._recent)
        last = [last for before, last in self._longer if recent[-len(before) :] == before]
        self.forbidden = self._always | token_words(last, self._vocab_size) if last else self._always


class TokenConstraint:
    """The ids that a request allows, without those that would complete one of its bad words.

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
        """Go past a token; -> whether a grammar's mask is to be computed and taken before the next."""
        self._bad_words.consume(token_id)
        self.mask = self._allowed & ~self._bad_words.forbidden
        return False


class GrammarConstraint(TokenConstraint):
    """A grammar in the state that a sequence's tokens have brought it to.

    Where the grammar holds from a later token on, the sequence cannot end before. Where it depends on the first
    token whether that is so, both ways are open until then.
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
        # What may come while the grammar does not hold yet.
        self._before = self._allowed & ~(self._ends | token_words(params.stop_token_ids, vocab_size))
        if self._section_token_id is not None:
            self.take(self._first_mask)
            section = token_words([self._section_token_id], vocab_size)
            self.mask |= section & self._before & ~self._bad_words.forbidden
        elif self._start_token_id is not None:
            self.mask = self._before & ~self._bad_words.forbidden
        else:
            self.take(self._first_mask)
        if self.error is not None or not self.mask.any():
            raise InvalidRequestError(self._dead_end(), param=self.param)

    def consume(self, token_id: int) -> bool:
        """As for every constraint; a grammar that cannot go on says so in `error`."""
        self._bad_words.consume(token_id)
        if self._section_token_id is not None:
            if token_id != self._section_token_id:
                self._start_token_id = None
            self._section_token_id = None
            self.is_complete = False
        if self._start_token_id is not None:
            if token_id == self._start_token_id:
                self._start_token_id = None
                self.take(self._first_mask)
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

    def take(self, words: Words) -> None:
        """Make what the grammar lets follow, whose vocabulary may be the larger, the new mask."""
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
    """Take each constraint past the token that its sequence chose; without a compiler there are no grammars."""
    moved = [each for each, token_id in zip(constraints, token_ids, strict=True) if each.consume(token_id)]
    waiting = [each for each in moved if isinstance(each, GrammarConstraint)]
    if waiting and compiler is not None:
        masks = compiler.fill_masks([each.matcher for each in waiting])
        for row, each in enumerate(waiting):
            each.take(masks[row])


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
