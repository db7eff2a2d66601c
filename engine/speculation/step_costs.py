"""Measured time of steps with and without drafts, and the acceptance from which drafts pay (as in Liu et al. 2024,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput")."""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest measurement
FADING = 0.99  # of a draft token's measured cost, in each step without drafts: so that drafts are tried again
EXACT_SEQS = 16  # numbers of sequences up to which each is measured on its own, and beyond which eight together


class StepCosts:
    """Learns from steps in which all sequences decode, for each number of them."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of a step without drafts
        self._per_draft: dict[int, float] = {}  # seconds by which a step is longer for each draft token

    def record_step(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """A step took `seconds`, from the end of the one before to its own."""
        key = _key(num_seqs)
        known = self._seconds.get(key)
        if num_drafts == 0:
            self._seconds[key] = seconds if known is None else known + SMOOTHING * (seconds - known)
            if key in self._per_draft:
                self._per_draft[key] *= FADING
        elif known is not None:
            extra = max(seconds - known, 0.0) / num_drafts
            before = self._per_draft.get(key)
            self._per_draft[key] = extra if before is None else before + SMOOTHING * (extra - before)

    def least_probability(self, num_seqs: int) -> float:
        """A draft token that is accepted with this probability costs as much time as it saves; 0 before it is known."""
        key = _key(num_seqs)
        seconds = self._seconds.get(key)
        return self._per_draft.get(key, 0.0) * num_seqs / seconds if seconds else 0.0


def _key(num_seqs: int) -> int:
    return num_seqs if num_seqs <= EXACT_SEQS else -(-num_seqs // 8) * 8
