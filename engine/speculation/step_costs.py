"""Measured time of steps with and without drafts."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median
from typing import NamedTuple

SMOOTHING = 0.2  # weight of the newest step with drafts
# What was not measured for a step is taken to cost so much less than it did, so that it is tried again: drafts beside
# many sequences after some hundred steps, as a trial costs what the host does before and behind it, and a step without
# drafts the later the more time these save. Both are tried sooner at first, as what was measured may have been slow.
FADING = 0.0005
FIRST_FADING = 0.003
FORGETTING = 0.002
FIRST_FORGETTING = 0.01
STALE = 0.95  # of what is left of a measurement: a newer one is better than several older ones
FEWEST = 3  # steps without drafts that are measured before any is tried
NEWEST = 5  # of them whose median counts, as one may be slow for reasons of its own
EXACT_SEQS = 16  # numbers of sequences up to which each has a time of its own, and beyond which eight have one
NEAR = 8  # numbers of sequences are near each other that differ by this part, or by one
# What is known of a draft token's share at first, as a variance of their number: its square times this.
PRIOR_VARIANCE = 0.004
SLOPE_SMOOTHING = 0.05
SLOWEST = 1.5  # of what is expected, a step with drafts counts as at most


class DraftCost(NamedTuple):
    """Seconds that a step takes longer with drafts: in any case, as nothing runs ahead of it, and for each token."""

    fixed: float
    each: float

    def of(self, num_tokens: int) -> float:
        return self.fixed + self.each * num_tokens if num_tokens else 0.0


FREE = DraftCost(0.0, 0.0)


class Costs(NamedTuple):
    """What is expected of a step: seconds without drafts, which of late may be `best` as well, and what drafts add."""

    plain: float
    best: float
    drafts: DraftCost


class Plain:
    """Steps without drafts.

    Attributes:
        seconds: of one; None before some are known.
        faded: share of that which is left since one was measured last.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.faded = 1.0
        self._newest: deque[float] = deque(maxlen=NEWEST)
        self._forgetting = FIRST_FORGETTING

    def add(self, seconds: float) -> None:
        if self.faded < STALE:  # a trial: drafts have been made for long
            self._newest.clear()
            self._forgetting = max(self._forgetting / 2.0, FORGETTING)
        self._newest.append(seconds)
        if self.seconds is not None or len(self._newest) >= FEWEST:
            self.seconds = median(self._newest)
        self.faded = 1.0

    def fade(self) -> None:
        """A step had drafts."""
        self.faded *= 1.0 - self._forgetting


class Drafted:
    """What drafts add to a step, a line through measurements of which old ones are forgotten.

    Attributes:
        is_measured: else there are bounds at most.
        line: as it was measured last; None before something is known.
    """

    def __init__(self) -> None:
        self.is_measured = False
        self._tokens = 0.0  # means, and their variance and covariance
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self.line: DraftCost | None = None
        self._faded = 1.0
        self._fading = FIRST_FADING

    @property
    def cost(self) -> DraftCost | None:
        """The line, less what was forgotten of it."""
        if self.line is None or self._faded == 1.0:
            return self.line
        return DraftCost(self._faded * self.line.fixed, self._faded * self.line.each)

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step with so many draft tokens took so much longer."""
        if self._faded < STALE:  # a trial
            self._fading = max(self._fading / 2.0, FADING)
        weight = max(SMOOTHING, 1.0 - self._faded) if self.is_measured else 1.0
        more_tokens, more_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += weight * more_tokens
        self._seconds += weight * more_seconds
        if self.is_measured:
            kept = 1.0 - SLOPE_SMOOTHING
            self._variance = kept * (self._variance + SLOPE_SMOOTHING * more_tokens**2)
            self._covariance = kept * (self._covariance + SLOPE_SMOOTHING * more_tokens * more_seconds)
        through_zero = self._seconds / self._tokens
        prior = PRIOR_VARIANCE * self._tokens**2
        slope = (self._covariance + prior * through_zero) / (self._variance + prior)
        each = min(max(slope, 0.0), through_zero)
        self.line = DraftCost(self._seconds - each * self._tokens, each)
        self.is_measured, self._faded = True, 1.0

    def bound(self, num_tokens: int, seconds: float) -> None:
        """A step with so many draft tokens, and more to do, took at most so much longer for them."""
        if not self.is_measured:
            known = math.inf if self.line is None else self.line.each
            self.line = DraftCost(0.0, min(known, seconds / num_tokens))
        self._faded = 1.0

    def fade(self) -> None:
        """A step had none."""
        self._faded *= 1.0 - self._fading


class StepCosts:
    """Learns from steps by their number of sequences, and most from those in which all decode."""

    def __init__(self) -> None:
        self._plain: defaultdict[int, Plain] = defaultdict(Plain)  # by number of sequences
        self._drafted: defaultdict[int, Drafted] = defaultdict(Drafted)  # by the bits of that number

    def record_step(self, num_seqs: int, num_drafts: int, seconds: float, *, is_plain: bool = True) -> None:
        """A step took `seconds`, from the end of the one before to its own.

        One that is not `is_plain` read texts as well, or had no drafts and yet did not run ahead. What drafts cost in
        such a step is only bounded. But it is known then that they were tried.
        """
        plain, drafted = self._plain[_key(num_seqs)], self._drafted[num_seqs.bit_length()]
        if num_drafts == 0:
            if is_plain:
                plain.add(seconds)
                drafted.fade()
            return
        known = self._find_plain(num_seqs)
        plain.fade()
        if not is_plain or known is None:
            drafted.bound(num_drafts, max(seconds - (known or 0.0), 0.0))
            return
        if drafted.is_measured and drafted.line is not None:  # one slow step says little
            seconds = min(seconds, SLOWEST * (known + drafted.line.of(num_drafts)))
        drafted.add(num_drafts, max(seconds - known, 0.0))

    def expect(self, num_seqs: int) -> Costs | None:
        """For a step of so many sequences; None before steps without drafts are known.

        Drafts that were never tried cost nothing. Where only steps of fewer sequences had some, they cost what they did
        there, if these are not much fewer: trying them is dear beside many.
        """
        plain = self._find_plain(num_seqs)
        if plain is None:
            return None
        own = self._plain.get(_key(num_seqs))
        best = plain if own is None else own.faded * plain
        return Costs(plain, best, self._find_drafted(num_seqs.bit_length()) or FREE)

    def _find_drafted(self, size: int) -> DraftCost | None:
        own = self._drafted.get(size)
        if own is not None and (cost := own.cost) is not None:
            return cost
        for fewer in (size - 1, size - 2):
            other = self._drafted.get(fewer)
            if other is not None and other.is_measured:
                return other.cost
        return None

    def _find_plain(self, num_seqs: int) -> float | None:
        """Measured seconds of a step of so many sequences, else on the line between those of fewer and of more, else
        those of a number that is near."""
        key = _key(num_seqs)
        own = self._plain.get(key)
        if own is not None and own.seconds is not None:
            return own.seconds
        known = [(other, plain.seconds) for other, plain in self._plain.items() if plain.seconds is not None]
        fewer = max([each for each in known if each[0] < key], default=None)
        more = min([each for each in known if each[0] > key], default=None)
        if fewer is not None and more is not None:
            share = (key - fewer[0]) / (more[0] - fewer[0])
            return fewer[1] + share * (more[1] - fewer[1])
        found = fewer or more
        return found[1] if found is not None and abs(found[0] - key) <= num_seqs // NEAR + 1 else None


def _key(num_seqs: int) -> int:
    return num_seqs if num_seqs <= EXACT_SEQS else -(-num_seqs // 8) * 8
