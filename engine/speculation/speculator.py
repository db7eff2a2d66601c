"""Decides how many tokens are drafted for each sequence in a step, and counts what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from tessera.engine.contract.messages import TokenIds
from tessera.engine.contract.speculation.settings import Speculation
from tessera.engine.grammar.compiler import GrammarCompiler
from tessera.engine.grammar.constraint import TokenConstraint
from tessera.engine.grammar.token_tables import Words
from tessera.engine.speculation.drafting import Drafter, Drafting
from tessera.engine.speculation.earlier_texts import EarlierTexts
from tessera.engine.speculation.look_up import LookUp
from tessera.engine.speculation.masks import masks_along
from tessera.engine.speculation.prediction import PredictionDrafter
from tessera.engine.speculation.step_costs import StepCosts
from tessera.engine.speculation.suffixes import IndexBudget, SuffixDrafter


class DraftedSequence(Protocol):
    """The part of a running sequence that drafts concern; see `engine.core.sequence.Sequence`."""

    token_ids: TokenIds
    max_num_tokens: int
    num_pending_tokens: int
    constraint: TokenConstraint | None
    drafting: Drafting | None
    draft: list[int]
    draft_masks: list[Words]

    @property
    def can_draft(self) -> bool: ...


class Speculator:
    """The engine's drafting, by its settings.

    Attributes:
        num_drafts: sequences' steps that verified draft tokens.
        num_draft_tokens: tokens that were drafted in them.
        num_accepted_by_position: [num_tokens], draft tokens that were accepted, by their place in their draft.
        costs: of steps; see `StepCosts`.
    """

    def __init__(self, settings: Speculation) -> None:
        self.settings = settings
        self.costs = StepCosts()
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_by_position = [0] * settings.num_tokens
        self._earlier = EarlierTexts()
        self._indexing = IndexBudget()

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_by_position)

    def make_drafting(self, salt: bytes, num_prompt_tokens: int, prediction: TokenIds | None) -> Drafting:
        """Drafts for a sequence of `salt`, whose completion is expected to be much like `prediction`."""
        drafters: list[Drafter] = []
        if prediction:
            drafters.append(PredictionDrafter(prediction, num_prompt_tokens))
        if self.settings.method == "suffix":
            drafters.append(SuffixDrafter(self._earlier.of_salt(salt), self._indexing))
        else:
            drafters.append(LookUp(self.settings.lookup_min, self.settings.lookup_max))
        return Drafting(drafters)

    def awaits_tokens(self, running: Sequence[DraftedSequence]) -> bool:
        """Whether the next step should wait for the tokens of the one before, because a draft is likely to follow.

        Otherwise it runs ahead of them, and drafts nothing.
        """
        if not self._may_pay(len(running)):
            return False
        self._indexing.renew()
        for sequence in running:
            if sequence.drafting is not None and sequence.num_pending_tokens:
                proposal = self._propose(sequence.drafting, sequence)
                if len(proposal) > 1 and self._most_tokens(sequence.drafting, len(running)) > 1:
                    return True
        return False

    def draft(self, running: Sequence[DraftedSequence], compiler: GrammarCompiler | None) -> None:
        """Set the drafts of the next step, for sequences whose tokens are all known."""
        if not self._may_pay(len(running)):
            return
        self._indexing.renew()
        for sequence in running:
            if sequence.drafting is None or not sequence.can_draft:
                continue
            proposal = self._propose(sequence.drafting, sequence)
            room = sequence.max_num_tokens - len(sequence.token_ids) - 1
            draft = proposal[: min(self._most_tokens(sequence.drafting, len(running)), room)]
            if draft and sequence.constraint is not None:
                sequence.draft_masks = masks_along(sequence.constraint, draft, compiler)
                draft = draft[: len(sequence.draft_masks)]
            sequence.draft = draft

    def _propose(self, drafting: Drafting, sequence: DraftedSequence) -> list[int]:
        # One more than a draft has: where a token is on its way, that comes first.
        return drafting.propose(sequence.token_ids, self.settings.num_tokens + 1, sequence.constraint)

    def _may_pay(self, num_seqs: int) -> bool:
        """Whether drafts can save time beside so many sequences, however good they are."""
        return self.settings.always or self.costs.least_probability(num_seqs) < 1.0

    def _most_tokens(self, drafting: Drafting, num_seqs: int) -> int:
        """Most tokens of the sequence's draft that are worth their time in a step of `num_seqs` sequences."""
        most = self.settings.num_tokens
        least = self.costs.least_probability(num_seqs)
        if self.settings.always or least <= 0.0:
            return most
        # A token is accepted only with all before it.
        rate = min(drafting.acceptance_rate, 0.999)
        return min(most, int(math.log(least) / math.log(rate))) if least < 1.0 else 0

    def note_verified(self, drafting: Drafting, num_draft_tokens: int, num_accepted: int) -> None:
        """Count a sequence's draft."""
        drafting.note_verified(num_draft_tokens, num_accepted)
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        for position in range(num_accepted):
            self.num_accepted_by_position[position] += 1

    def keep_completion(self, salt: bytes, completion: TokenIds, num_seqs: int) -> None:
        """Let later sequences of `salt` look into it, unless `num_seqs` sequences are too many for drafts."""
        if self.settings.method == "suffix" and completion and self._may_pay(num_seqs):
            self._earlier.append_text(salt, completion)

    def forget_completions(self) -> None:
        self._earlier.forget()
