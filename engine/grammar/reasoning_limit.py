"""A budget of reasoning: its end is forced once it is spent."""

from __future__ import annotations

from tessera.engine.contract.sampling_params import ReasoningBudget

MAX_FIRST_TOKENS = 4  # that may come before the token that begins the reasoning: white space
LOOKAHEAD = 2  # tokens of a sequence that may be chosen before the result of the one before them is known


class ReasoningLimit:
    """Follows the reasoning at the beginning of a completion.

    Attributes:
        forced: the token that must come next, or None.
    """

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._num_first_tokens = 0
        self._num_tokens: int | None = None if budget.begin_token_id is not None else 0  # of the reasoning so far
        self._is_over = False
        self.forced: int | None = None
        self._force()

    @property
    def is_far(self) -> bool:
        """Whether none of the next tokens can be the forced one, as far as steps are computed ahead."""
        if self._is_over:
            return True
        return (self._num_tokens or 0) + LOOKAHEAD < self._budget.max_tokens

    def consume(self, token_id: int) -> None:
        """Advance past the token that was chosen."""
        if self._is_over:
            return
        if self._num_tokens is None:
            self._num_first_tokens += 1
            if token_id == self._budget.begin_token_id:
                self._num_tokens = 0
            elif self._num_first_tokens == MAX_FIRST_TOKENS:
                self._is_over = True
        elif token_id == self._budget.end_token_id:
            self._is_over = True
        else:
            self._num_tokens += 1
        self._force()

    def _force(self) -> None:
        is_spent = not self._is_over and self._num_tokens is not None and self._num_tokens >= self._budget.max_tokens
        self.forced = self._budget.end_token_id if is_spent else None
