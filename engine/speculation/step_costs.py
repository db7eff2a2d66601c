"""Measured time of steps with and without drafts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

SMOOTHING = 0.2  # weight of the newest step with drafts
# What was not measured for a step is taken to cost so much less than it did, so that it is tried again: drafts beside
# many sequences after some hundred steps, as a trial costs what the host does before and behind it, and a step without
# drafts the later the more time these save, and sooner at first, as what was measured may have been slow.
FADING = 0.997
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


@dataclass(frozen=True)
class DraftCost:
    """Seconds that a step takes longer with drafts: in any case, as nothing runs ahead of it, and for each token."""

    fixed: float
    each: float

    def of(self, num_tokens: int) -> float:
        return self.fixed + self.each * num_tokens if num_tokens else 0.0


@dataclass(frozen=True)
class Costs:
    """What is expected of a step: seconds without drafts, which of late may be `best` as well, and what drafts add."""

    plain: float
    best: float
    drafts: DraftCost


class Plain:
    """Seconds of steps without drafts.

    Attributes:
        faded: share of them that is left since they were measured last.
    """

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=NEWEST)
        self._is_known = False
        self._forgetting = FIRST_FORGETTING
        self.faded = 1.0

    @property
    def seconds(self) -> float | None:
        """None before some are known."""
        return median(self._newest) if self._is_known else None

    def add(self, seconds: float) -> None:
        if self.faded < STALE:  # a trial: drafts have been made for long
            self._newest.clear()
            self._forgetting = max(self._forgetting / 2.0, FORGETTING)
        self._newest.append(seconds)
        self._is_known = self._is_known or len(self._newest) >= FEWEST
        self.faded = 1.0

    def fade(self) -> None:
        """A step had drafts."""
        self.faded *= 1.0 - self._forgetting


class Drafted:
    """What drafts add to a step, a line through measurements of which old ones are forgotten."""

    def __init__(self) -> None:
        self._tokens = 0.0  # means, and their variance and covariance
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._bound: float | None = None  # of a token, before there is a measurement
        self._faded = 1.0

    @property
    def cost(self) -> DraftCost | None:
        """None before something is known."""
        if not self._tokens:
            return None if self._bound is None else DraftCost(0.0, self._faded * self._bound)
        through_zero = self._seconds / self._tokens
        prior = PRIOR_VARIANCE * self._tokens**2
        slope = (self._covariance + prior * through_zero) / (self._variance + prior)
        each = min(max(slope, 0.0), through_zero)
        return DraftCost(self._faded * (self._seconds - each * self._tokens), self._faded * each)

    @property
    def is_measured(self) -> bool:
        return self._tokens > 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step with so many draft tokens took so much longer."""
        if not self._tokens:
            self._tokens, self._seconds, self._faded = num_tokens, seconds, 1.0
            return
        weight = max(SMOOTHING, 1.0 - self._faded)
        more_tokens, more_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += weight * more_tokens
        self._seconds += weight * more_seconds
        kept = 1.0 - SLOPE_SMOOTHING
        self._variance = kept * (self._variance + SLOPE_SMOOTHING * more_tokens**2)
        self._covariance = kept * (self._covariance + SLOPE_SMOOTHING * more_tokens * more_seconds)
        self._faded = 1.0

    def bound(self, num_tokens: int, seconds: float) -> None:
        """A step with so many draft tokens, and more to do, took at most so much longer for them."""
        bound = seconds / num_tokens
        self._bound = bound if self._bound is None else min(self._bound, bound)
        self._faded = 1.0

    def fade(self) -> None:
        """A step had none."""
        self._faded *= FADING


class StepCosts:
    """Learns from steps by their number of sequences, and most from those in which all decode."""

    def __init__(self) -> None:
        self._plain: dict[int, Plain] = {}  # by number of sequences
        self._drafted: dict[int, Drafted] = {}  # by the bits of that number

    def record_step(self, num_seqs: int, num_drafts: int, seconds: float, *, is_plain: bool = True) -> None:
        """A step took `seconds`, from the end of the one before to its own.

        One that is not `is_plain` read texts as well, or had no drafts and yet did not run ahead. What drafts cost in
        such a step is only bounded. But it is known then that they were tried.
        """
        drafted = self._drafted.setdefault(num_seqs.bit_length(), Drafted())
        if num_drafts == 0:
            if is_plain:
                self._plain.setdefault(_key(num_seqs), Plain()).add(seconds)
                drafted.fade()
            return
        known = self._find_plain(num_seqs)
        self._plain.setdefault(_key(num_seqs), Plain()).fade()
        if not is_plain or known is None:
            drafted.bound(num_drafts, max(seconds - (known or 0.0), 0.0))
            return
        cost = drafted.cost
        if cost is not None and drafted.is_measured:  # one slow step says little
            seconds = min(seconds, SLOWEST * (known + cost.of(num_drafts)))
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
        return Costs(plain, best, self._find_drafted(num_seqs.bit_length()) or DraftCost(0.0, 0.0))

    def _find_drafted(self, size: int) -> DraftCost | None:
        own = self._drafted.get(size)
        if own is not None and own.cost is not None:
            return own.cost
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
