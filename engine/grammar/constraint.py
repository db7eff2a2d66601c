"""Token masks of a sequence: allowed ids, bad words, a grammar and a budget of reasoning."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from tessera.engine.grammar.reasoning_limit import ReasoningLimit
from tessera.engine.grammar.token_tables import NONE_BEGUN, TokenTables, Words, token_bytes


class BadWords:
    """Forbidden sequences of tokens: the last of each is masked once the others have been chosen."""

    def __init__(self, tables: TokenTables) -> None:
        self._tables = tables
        self._recent = b""  # tokens, the newest first
        self._begun = NONE_BEGUN

    def consume(self, token_id: int) -> None:
        """Advance past the token that was chosen."""
        words = self._tables.bad_words
        if words.longest:
            self._recent = (token_bytes((token_id,)) + self._recent)[: words.longest]
            self._begun = words.longest_begun(self._recent)

    def permitted(self, allowed: Words) -> Words:
        """`allowed` but for the tokens that cannot come next; it may be all sequences'."""
        return self._tables.permitted(allowed, self._begun)

    def branch(self) -> BadWords:
        """A copy that goes its own way."""
        return copy.copy(self)


class TokenConstraint:
    """The allowed ids of a request, without those that would complete one of its bad words.

    Where a budget of reasoning is spent, only its end is allowed.

    Attributes:
        mask: [ceil(vocab_size / 32)]; the tokens that may come next.
        is_complete: nothing but the end can follow.
        is_idle: no mask is needed for the next tokens.
        error: why the sequence cannot go on, or None.
        param: the request field that constrains it, for errors.
    """

    is_complete = False
    is_idle = False
    error: str | None = None

    def __init__(self, params: SamplingParams, vocab_size: int, tables: TokenTables | None = None) -> None:
        """`tables`: those of `params`, where sequences share them."""
        tables = tables if tables is not None else TokenTables(params, vocab_size)
        self._tables = tables
        self.param = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
        self._allowed = tables.allowed
        self._bad_words = BadWords(tables)
        budget = params.reasoning_budget
        self._limit = ReasoningLimit(budget) if budget is not None else None
        self.mask = self._limited(self._permitted(self._allowed))

    def consume(self, token_id: int) -> bool:
        """Advance past a token; -> whether a grammar's mask must be computed and applied before the next."""
        self._note_token(token_id)
        self.mask = self._limited(self._permitted(self._allowed))
        return False

    def branch(self) -> TokenConstraint:
        """A copy in the same state that goes its own way."""
        branch = copy.copy(self)
        branch._bad_words = self._bad_words.branch()
        branch._limit = copy.copy(self._limit)
        return branch

    def forced_tokens(self) -> list[int]:
        """Tokens that come next if the constraint leaves no other text; [] where it leaves a choice."""
        forced = self._limit.forced if self._limit is not None else None
        return [] if forced is None else [forced]

    def _note_token(self, token_id: int) -> None:
        self._bad_words.consume(token_id)
        if self._limit is not None:
            self._limit.consume(token_id)

    def _permitted(self, allowed: Words) -> Words:
        """`allowed` without the tokens that would complete a bad word."""
        return self._bad_words.permitted(allowed)

    def _limited(self, mask: Words) -> Words:
        """The mask, or the end of the reasoning alone where that is due."""
        return self._tables.end_of_reasoning if self._limit is not None and self._limit.forced is not None else mask


class ReasoningConstraint(TokenConstraint):
    """A budget of reasoning alone: idle until it is nearly spent, and again once the reasoning is over."""

    def __init__(self, params: SamplingParams, vocab_size: int, tables: TokenTables | None = None) -> None:
        super().__init__(params, vocab_size, tables)
        assert params.reasoning_budget is not None, "a constraint by a budget has one"
        self.param = params.reasoning_budget.param
        self._note_distance()

    def consume(self, token_id: int) -> bool:
        super().consume(token_id)
        self._note_distance()
        return False

    def _note_distance(self) -> None:
        assert self._limit is not None
        self.is_idle = self._limit.is_far


class GrammarConstraint(TokenConstraint):
    """A grammar in the state after a sequence's tokens.

    While the grammar waits for its start token, the sequence cannot end. Where the first token decides whether it
    waits, the mask allows both.
    """

    def __init__(
        self,
        params: SamplingParams,
        compiled: CompiledGrammar,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tables: TokenTables | None = None,
    ) -> None:
        """Raises: InvalidRequestError if no token can come first."""
        super().__init__(params, vocab_size, tables)
        grammar = params.grammar
        assert grammar is not None, "a constraint by a grammar has one"
        self.param = grammar.param
        self._ends = self._tables.words(tuple(eos_token_ids))
        if params.ignore_eos:
            self._allowed = self._allowed & ~self._ends
        self._first_mask = compiled.first_mask
        self.matcher = compiled.matcher.deep_copy()
        self._start_token_id = grammar.start_token_id
        self._section_token_id = grammar.section_token_id
        # The mask while the grammar waits for its start token.
        self._before = self._allowed & ~(self._ends | self._tables.words(params.stop_token_ids))
        if self._section_token_id is not None:
            self.apply_mask(self._first_mask)
            section = self._tables.words((self._section_token_id,))
            self.mask |= self._permitted(section & self._before)
        elif self._start_token_id is not None:
            self.mask = self._limited(self._permitted(self._before))
        else:
            self.apply_mask(self._first_mask)
        if self.error is not None or not self.mask.any():
            raise InvalidRequestError(self._dead_end(), param=self.param)

    def consume(self, token_id: int) -> bool:
        """See TokenConstraint; sets `error` if the grammar cannot go on."""
        self._note_token(token_id)
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
                self.mask = self._limited(self._permitted(self._before))
            return False
        if not self.matcher.consume_token(token_id):
            self.error = self._too_complex()
        elif self.matcher.is_stopped():
            self.is_complete = True
        else:
            return True
        return False

    def branch(self) -> GrammarConstraint:
        branch = super().branch()
        assert isinstance(branch, GrammarConstraint)
        branch.matcher = self.matcher.deep_copy()
        return branch

    def forced_tokens(self) -> list[int]:
        forced = super().forced_tokens()
        if forced or self._start_token_id is not None or self._section_token_id is not None or self.is_complete:
            return forced
        return self.matcher.compute_ff_tokens()

    def apply_mask(self, words: Words) -> None:
        """Set the mask from the grammar's own, whose vocabulary may be larger."""
        mask = self._permitted(words[: len(self._allowed)] & self._allowed)
        if (limited := self._limited(mask) & mask).any():  # a grammar of tool calls has the reasoning in it
            mask = limited
        self.mask = mask
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
