"""Drafts by the longest end of the text that has occurred before (as in Oliaro et al. 2024, "SuffixDecoding")."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import ref

from tessera.engine.contract.messages import TokenIds
from tessera.engine.speculation.earlier_texts import EarlierTexts
from tessera.engine.speculation.look_up import go_on
from tessera.engine.speculation.suffix_automaton import ROOT, SuffixAutomaton

MIN_MATCH = 2  # tokens
DRAFT_PER_MATCH = 2  # draft tokens for each token that matches
MAX_TEXT = 1 << 13  # tokens of a prompt that are indexed, the last ones; some 500 bytes each
# Tokens of all sequences that are indexed before a step, while the device may wait: half a millisecond; and while it
# computes one.
MAX_AT_ONCE = 1 << 8
MAX_BEHIND = 1 << 10
MAX_FOLLOWED = 1 << 6  # new tokens that are looked up on from the last match
LAST_FOLLOWED = 1 << 4  # of more than those the last ones, without it


class IndexBudget:
    """Tokens that all drafters together may still index before the next step, and what is indexed while that runs:
    the texts of drafters that are behind, unless nobody else needs them any more, and then completions."""

    def __init__(self, earlier: EarlierTexts) -> None:
        self.left = MAX_AT_ONCE
        self.behind: OrderedDict[ref[SuffixDrafter], None] = OrderedDict()
        self._earlier = earlier

    def renew(self) -> None:
        self.left = MAX_AT_ONCE

    def catch_up(self) -> None:
        """Index on, ideally while the step runs."""
        left = MAX_BEHIND
        while self.behind and left > 0:
            reference, _ = self.behind.popitem(last=False)
            drafter = reference()
            if drafter is None:
                continue
            left -= drafter.catch_up(left)
            if drafter.is_behind:  # others have their turn before it
                self.behind[reference] = None
        if left > 0:
            self._earlier.catch_up(left)


class SuffixDrafter:
    """Follows one sequence's text, and looks for its end in itself and in earlier completions.

    The device may wait for a proposal. So new tokens are looked up in the text in front of them, and indexed later: of
    several, an end that occurs nowhere but within them is found one step later.

    Attributes:
        is_behind: tokens that were read are not indexed.
    """

    def __init__(self, earlier: Sequence[SuffixAutomaton], budget: IndexBudget) -> None:
        self.is_behind = False
        self._budget = budget
        self._own = SuffixAutomaton()
        self._match = (ROOT, 0)  # of the text's end in what is indexed of it
        self._repeated = (0, 0)  # the indexed text's end, as the automaton has it
        self._earlier = earlier
        self._matches = [(ROOT, 0) for _ in earlier]
        self._text: TokenIds | None = None
        self._num_read = 0
        self._num_indexed = 0
        self._was_indexed = False  # all that had been read then

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
        if len(proposal) < most and self.is_behind:  # the indexed text's end is reached
            proposal += token_ids[self._num_indexed : self._num_indexed + most].tolist()
        return go_on(proposal, most)

    def catch_up(self, most: int) -> int:
        """Index at most so many of the tokens that were read; -> how many those were."""
        first, text = self._num_indexed, self._text
        new = text[first : min(first + most, self._num_read)] if text is not None and most > 0 else ()
        if new:
            for token_id in new:
                self._own.append_token(token_id)
            self._num_indexed += len(new)
        self.is_behind = self._num_indexed < self._num_read
        if new and not self.is_behind:
            self._was_indexed = True
            self._repeated = self._own.repeated_end()
            self._match = self._own.end_match()
        return len(new)

    def _read(self, token_ids: TokenIds) -> tuple[int, int] | None:
        """-> the longest end of the text that occurs elsewhere in it, as `SuffixAutomaton.repeated_end` has it; None
        before all of it was indexed once, or where too much is to be read before the next step."""
        budget, own = self._budget, self._own
        if self._text is None:
            self._text = token_ids
            self._num_read = self._num_indexed = max(len(token_ids) - MAX_TEXT, 0)
        elif self._was_indexed and 0 < self._num_read - self._num_indexed <= LAST_FOLLOWED:
            budget.left -= self.catch_up(budget.left)
        first, self._num_read = self._num_read, len(token_ids)
        if len(token_ids) - first > MAX_FOLLOWED:
            if budget.left <= 0:
                self._num_read = first
                return None
            first = len(token_ids) - LAST_FOLLOWED
            budget.left -= LAST_FOLLOWED
            self._match, self._matches = (ROOT, 0), [(ROOT, 0) for _ in self._matches]
        new = token_ids[first:]
        for number, automaton in enumerate(self._earlier):
            self._matches[number] = automaton.follow(self._matches[number], new)
        if self._was_indexed:
            self._match = own.follow(self._match, new)
        else:
            budget.left -= self.catch_up(budget.left)
            if self._was_indexed:
                return self._repeated
        self.is_behind = self._num_indexed < self._num_read
        if self.is_behind:
            budget.behind[ref(self)] = None
        if not self._was_indexed:
            return None
        state, length = self._match
        return length, own.place_behind(state)
