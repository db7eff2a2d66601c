"""How likely a sequence's draft tokens are to be chosen, from what its proposals have come to."""

from __future__ import annotations

from tessera.engine.contract.messages import TokenIds

FORGETTING = 0.85  # weight of what is known when something new is learned
PRIOR = (1.5, 0.5)  # chosen and not chosen, before anything is known
FADING = 0.01  # share of the way back to that in a step without a draft


class Acceptance:
    """Compares proposals with the tokens that came, whether they were drafted or not.

    Attributes:
        rate: estimated probability that a proposed token is chosen where those before it are.
    """

    def __init__(self) -> None:
        self._chosen, self._missed = PRIOR
        self._proposal: list[int] = []
        self._place = 0

    @property
    def rate(self) -> float:
        return self._chosen / (self._chosen + self._missed)

    def note_draft(self, num_tokens: int, num_chosen: int) -> None:
        """Of a draft that was verified and is no proposal, so many tokens were chosen."""
        self._chosen = FORGETTING * self._chosen + num_chosen
        self._missed = FORGETTING * self._missed + (num_chosen < num_tokens)

    def fade(self) -> None:
        """A step went by in which nothing was learned, as nothing seemed worth a draft."""
        prior_chosen, prior_missed = PRIOR
        self._chosen += FADING * (prior_chosen - self._chosen)
        self._missed += FADING * (prior_missed - self._missed)

    def note_proposal(self, token_ids: TokenIds, proposal: list[int]) -> None:
        """These were proposed to follow `token_ids`; what the proposal before has come to is counted."""
        came = token_ids[self._place : self._place + len(self._proposal)].tolist()
        if self._proposal and came:
            num_chosen = count_equal(self._proposal, came)
            self._chosen = FORGETTING * self._chosen + num_chosen
            self._missed = FORGETTING * self._missed + (num_chosen < len(came))
        self._proposal, self._place = proposal, len(token_ids)


def count_equal(left: list[int], right: list[int]) -> int:
    """Length of the longest common beginning."""
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))
