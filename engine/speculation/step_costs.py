"""Measured time of steps with and without drafts, and the acceptance from which drafts pay (as in Liu et al. 2024,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput")."""

from __future__ import annotations

SMOOTHING = 0.2  # weight of the newest measurement
# Of a draft token's cost, in each step without drafts, so that drafts are tried again: some hundred steps later, as a
# trial beside many sequences costs what the host does before and behind it.
FADING = 0.997
EXACT_SEQS = 16  # numbers of sequences up to which each has a time of its own, and beyond which eight have one


class StepCosts:
    """Learns from steps by their number of sequences, and most from those in which all decode."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of a step without drafts, by number of sequences
        self._per_draft: dict[int, float] = {}  # seconds for a draft token, by the bits of that number
        self._at_most: dict[int, float] = {}  # the same where it was never measured
        self._faded: dict[int, float] = {}  # share of the cost that is left since drafts were last tried

    def record_step(self, num_seqs: int, num_drafts: int, seconds: float, *, is_plain: bool = True) -> None:
        """A step took `seconds`, from the end of the one before to its own; one that is not plain read texts as well.

        What drafts cost in such a step is only bounded. But it is known then that they were tried.
        """
        key, size = _key(num_seqs), num_seqs.bit_length()
        known = self._seconds.get(key)
        if num_drafts == 0:
            if is_plain:
                self._seconds[key] = _smoothed(known, seconds)
                self._faded[size] = FADING * self._faded.get(size, 1.0)
            return
        faded = self._faded.pop(size, 1.0)
        if not is_plain or known is None:
            bound = max(seconds - (known or 0.0), 0.0) / num_drafts
            self._at_most[size] = min(bound, self._at_most.get(size, bound))
            return
        if seconds < known:  # without drafts it had taken no longer
            known = self._seconds[key] = _smoothed(known, seconds)
        extra = max(seconds - known, 0.0) / num_drafts
        before = self._per_draft.get(size)
        if before is not None and extra < faded * before:
            before *= faded
        self._per_draft[size] = _smoothed(before, extra)

    def least_probability(self, num_seqs: int) -> float:
        """A draft token that is accepted with this probability saves as much time as it costs.

        1 before a step without drafts is known, and 0 before one with drafts is. Where only steps of fewer sequences
        had drafts, one costs what it did there, if they are not much fewer: trying it is dear beside many.
        """
        seconds, size = self._seconds.get(_key(num_seqs)), num_seqs.bit_length()
        if not seconds:
            return 1.0
        per_draft = self._per_draft.get(size, self._at_most.get(size))
        if per_draft is None:
            per_draft = self._per_draft.get(size - 1, self._per_draft.get(size - 2, 0.0))
        return self._faded.get(size, 1.0) * per_draft * num_seqs / seconds


def _key(num_seqs: int) -> int:
    return num_seqs if num_seqs <= EXACT_SEQS else -(-num_seqs // 8) * 8


def _smoothed(known: float | None, newest: float) -> float:
    return newest if known is None else known + SMOOTHING * (newest - known)
