"""Measured time of steps with and without drafts, and the acceptance from which drafts pay (as in Liu et al. 2024,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput")."""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest measurement
FADING = 0.99  # of a draft token's measured cost, in each step without drafts: so that drafts are tried again
EXACT_SEQS = 16  # numbers of sequences up to which each has a time of its own, and beyond which eight have one


class StepCosts:
    """Learns from steps in which all sequences decode, by their number."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of a step without drafts, by number of sequences
        self._per_draft: dict[int, float] = {}  # seconds for a draft token, by the bits of that number

    def record_step(self, num_seqs: int, num_drafts: int, seconds: float) -> None:
        """A step took `seconds`, from the end of the one before to its own."""
        key, size = _key(num_seqs), num_seqs.bit_length()
        known = self._seconds.get(key)
        if num_drafts == 0:
            self._seconds[key] = _smoothed(known, seconds)
            if size in self._per_draft:
                self._per_draft[size] *= FADING
        elif known is not None:
            if seconds < known:  # without drafts it had taken no longer
                known = self._seconds[key] = _smoothed(known, seconds)
            extra = max(seconds - known, 0.0) / num_drafts
            self._per_draft[size] = _smoothed(self._per_draft.get(size), extra)

    def least_probability(self, num_seqs: int) -> float:
        """A draft token that is accepted with this probability saves as much time as it costs.

        1 before a step without drafts is known, and 0 before one with drafts is.
        """
        seconds = self._seconds.get(_key(num_seqs))
        return self._per_draft.get(num_seqs.bit_length(), 0.0) * num_seqs / seconds if seconds else 1.0


def _key(num_seqs: int) -> int:
    return num_seqs if num_seqs <= EXACT_SEQS else -(-num_seqs // 8) * 8


def _smoothed(known: float | None, newest: float) -> float:
    return newest if known is None else known + SMOOTHING * (newest - known)
