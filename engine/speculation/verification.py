"""Verification: a step samples behind every draft token, and what was sampled decides how far the draft holds.

Each position is sampled as it would be without a draft, with its own random number, from logits that see the draft
tokens before it. A draft token is accepted where it is the one that was sampled, and behind the first that is not,
nothing counts. So the tokens are those of ordinary decoding with the same seed, and their distribution is that of the
model: for a draft that is certain of its tokens this is the rejection sampling of Leviathan et al. 2023 ("Fast
Inference from Transformers via Speculative Decoding"), which accepts a token x with its probability p(x).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class VerifiedDraft:
    """A sequence's draft in a step.

    Attributes:
        index: of the sequence among the sampled ones; the row of its first token.
        tokens: the draft, and with constraints no more of it than can be chosen.
        rows: the sampled rows behind each of the draft tokens.
        source: of the tokens: a method, `grammar` or `prediction`.
        slot: of the sequence, as long as only the device knows the tokens; else -1.
    """

    index: int
    tokens: list[int]
    rows: list[int]
    source: str
    slot: int = -1

    @property
    def is_unknown(self) -> bool:
        return self.slot >= 0

    def count_accepted(self, sampled: Sequence[int]) -> int:
        """How many draft tokens are those that were sampled in their places; `sampled` has a token for each row."""
        row = self.index
        for number, token_id in enumerate(self.tokens):
            if sampled[row] != token_id:
                return number
            row = self.rows[number]
        return len(self.tokens)
