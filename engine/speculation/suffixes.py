"""Drafts by the longest end of the text that has occurred before (as in Oliaro et al. 2024, "SuffixDecoding")."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.engine.contract.messages import TokenIds
from tessera.engine.speculation.look_up import go_on
from tessera.engine.speculation.suffix_automaton import ROOT, SuffixAutomaton

MIN_MATCH = 2  # tokens
DRAFT_PER_MATCH = 2  # draft tokens for each token that matches
MAX_TEXT = 1 << 13  # tokens of a prompt that are indexed, the last ones; some 500 bytes each
MAX_AT_ONCE = 1 << 10  # tokens indexed before a step, of all sequences: two milliseconds


class IndexBudget:
    """Tokens that all drafters together may still index before the next step."""

    def __init__(self) -> None:
        self.left = MAX_AT_ONCE

    def renew(self) -> None:
        self.left = MAX_AT_ONCE


class SuffixDrafter:
    """Follows one sequence's text, and looks for its end in itself and in earlier completions."""

    def __init__(self, earlier: Sequence[SuffixAutomaton], budget: IndexBudget) -> None:
        self._budget = budget
        self._own = SuffixAutomaton()
        self._earlier = earlier
        self._matches = [(ROOT, 0) for _ in earlier]
        self._num_read: int | None = None

    def propose(self, token_ids: TokenIds, most: int) -> list[int]:
        """At most `most` tokens that may follow; [] if nothing is found, or while the text is being indexed."""
        if not self._read(token_ids):
            return []
        length, place = self._own.repeated_end()
        source = self._own
        for automaton, (state, matched) in zip(self._earlier, self._matches, strict=True):
            if matched > length:
                length, place, source = matched, automaton.place_behind(state), automaton
        if length < MIN_MATCH:
            return []
        most = min(most, DRAFT_PER_MATCH * length)
        found = source.continuation(place, most)
        return go_on(found, most) if source is self._own else found

    def _read(self, token_ids: TokenIds) -> bool:
        """Index new tokens; -> whether all are."""
        first = self._num_read if self._num_read is not None else max(len(token_ids) - MAX_TEXT, 0)
        self._num_read = min(first + self._budget.left, len(token_ids))
        self._budget.left -= self._num_read - first
        for token_id in token_ids[first : self._num_read]:
            self._own.append_token(token_id)
            for number, automaton in enumerate(self._earlier):
                self._matches[number] = automaton.advance(self._matches[number], token_id)
        return self._num_read == len(token_ids)
