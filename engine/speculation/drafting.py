"""One sequence's drafts: where they come from, and how they have fared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tessera.engine.contract.messages import TokenIds
from tessera.engine.grammar.constraint import TokenConstraint
from tessera.engine.speculation.acceptance import Acceptance

GRAMMAR = "grammar"


class Drafter(Protocol):
    """Proposes at most `most` tokens that may follow a sequence's; [] for none. It is asked as the sequence grows."""

    def propose(self, token_ids: TokenIds, most: int) -> list[int]: ...


class Drafting:
    """What a sequence's grammar forces is drafted first, and else what the first of its drafters proposes.

    Attributes:
        source: of the last proposal: `grammar`, or the drafter's name.
        num_accepted, num_rejected: draft tokens so far.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        """`drafters` by their names."""
        self._drafters = drafters
        self.source = GRAMMAR
        self._acceptance = Acceptance()
        self._proposal: list[int] = []
        self._num_read = -1
        self.num_accepted = 0
        self.num_rejected = 0

    @property
    def acceptance_rate(self) -> float:
        """Estimated probability that a draft token is accepted if those before it are."""
        return self._acceptance.rate

    def propose(self, token_ids: TokenIds, most: int, constraint: TokenConstraint | None) -> list[int]:
        """At most `most` tokens that may follow `token_ids`; the same again until there are more."""
        if len(token_ids) != self._num_read:
            proposal = constraint.forced_tokens()[:most] if constraint is not None else []
            self.source = GRAMMAR
            for name, drafter in self._drafters.items():
                if proposal:
                    break
                proposal, self.source = drafter.propose(token_ids, most), name
            self._acceptance.note_proposal(token_ids, proposal)
            self._proposal, self._num_read = proposal, len(token_ids)
        return self._proposal

    def note_computed_draft(self, num_draft_tokens: int, num_accepted: int) -> None:
        """So many tokens of a draft that a model computed were accepted."""
        self._acceptance.note_draft(num_draft_tokens, num_accepted)

    def note_pause(self) -> None:
        """A model was not asked, as its drafts seem not worth their time."""
        self._acceptance.fade()

    def note_verified(self, num_draft_tokens: int, num_accepted: int) -> None:
        """So many draft tokens of a step were accepted."""
        self.num_accepted += num_accepted
        self.num_rejected += num_draft_tokens - num_accepted
