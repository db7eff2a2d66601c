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
MAX_FOLLOWED = 1 << 7  # new tokens that are looked up before they are indexed


class IndexBudget:
    """Tokens that all drafters together may still index before the next step, and drafters that do it behind it."""

    def __init__(self) -> None:
        self.left = MAX_AT_ONCE
        self.behind: list[SuffixDrafter] = []

    def renew(self) -> None:
        self.left = MAX_AT_ONCE

    def catch_up(self) -> None:
        """Have indexed what was only followed, ideally while the step runs."""
        for drafter in self.behind:
            drafter.catch_up()
        self.behind.clear()


class SuffixDrafter:
    """Follows one sequence's text, and looks for its end in itself and in earlier completions.

    The device may wait for a proposal. So a few new tokens are looked up in the text in front of them, and indexed
    later: of several, an end that occurs nowhere but within them is found one step later.
    """

    def __init__(self, earlier: Sequence[SuffixAutomaton], budget: IndexBudget) -> None:
        self._budget = budget
        self._own = SuffixAutomaton()
        self._match = (ROOT, 0)  # of the indexed text's end
        self._earlier = earlier
        self._matches = [(ROOT, 0) for _ in earlier]
        self._num_read: int | None = None
        self._is_indexed = False  # once all of it was
        self._followed: list[int] = []  # the last of the tokens that were read: they are not indexed

    def propose(self, token_ids: TokenIds, most: int) -> list[int]:
        """At most `most` tokens that may follow; [] if nothing is found, or while the text is being indexed."""
        found = self._read(token_ids)
        if found is None:
            return []
        length, place = found
        source = self._own
        for automaton, (state, matched) in zip(self._earlier, self._matches, strict=True):
            if matched > length:
                length, place, source = matched, automaton.place_behind(state), automaton
        if length < MIN_MATCH:
            return []
        most = min(most, DRAFT_PER_MATCH * length)
        proposal = source.continuation(place, most)
        if source is not self._own:
            return proposal
        if len(proposal) < most:  # the text's end is reached
            proposal += self._followed
        return go_on(proposal, most)

    def catch_up(self) -> None:
        """Index what was only followed."""
        if self._followed:
            for token_id in self._followed:
                self._own.append_token(token_id)
            self._followed = []
            self._own.repeated_end()
            self._match = self._own.end_match()

    def _read(self, token_ids: TokenIds) -> tuple[int, int] | None:
        """-> the longest end of the text that occurs elsewhere in it, as `SuffixAutomaton.repeated_end` has it; None
        before all of it is indexed."""
        self.catch_up()
        first = self._num_read if self._num_read is not None else max(len(token_ids) - MAX_TEXT, 0)
        follows = self._is_indexed and len(token_ids) - first <= MAX_FOLLOWED
        self._num_read = len(token_ids) if follows else min(first + self._budget.left, len(token_ids))
        new = token_ids[first : self._num_read]
        for number, automaton in enumerate(self._earlier):
            for token_id in new:
                self._matches[number] = automaton.advance(self._matches[number], token_id)
        if follows:
            self._followed = new.tolist()
            self._budget.behind.append(self)
            state, length = self._match
            for token_id in new:
                state, length = self._own.advance((state, length), token_id)
            return length, self._own.place_behind(state)
        self._budget.left -= len(new)
        for token_id in new:
            self._own.append_token(token_id)
        self._is_indexed = self._num_read == len(token_ids)
        if not self._is_indexed:
            return None
        self._match = self._own.end_match()
        return self._own.repeated_end()
