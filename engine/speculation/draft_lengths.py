"""How long drafts are worth their time (as in Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput")."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tessera.engine.speculation.step_costs import Costs

CERTAIN = 0.999  # rates are below it
MAX_ROUNDS = 4


class Candidate(NamedTuple):
    """A draft of at most `most` tokens, each chosen with probability `rate` where those before it are."""

    rate: float
    most: int


def choose_lengths(candidates: Sequence[Candidate], num_seqs: int, costs: Costs, max_tokens: int) -> list[int]:
    """Of the candidates' drafts, with which a step of `num_seqs` sequences yields most tokens a second; all 0 where it
    yields most without any.

    At a given speed a draft token is worth its time where it is chosen with at least the probability that the tokens
    lost in that time have. The lengths that are worth it at the speed without drafts are faster than that, if any are;
    and at their own speed others may be faster still.
    """
    speed = num_seqs / costs.plain
    best = [0] * len(candidates)
    for _ in range(MAX_ROUNDS):
        lengths = _worth_their_time(candidates, speed * costs.drafts.each)
        longest = longest_of(lengths, max_tokens)
        lengths = [min(length, longest) for length in lengths]
        gained = sum([_expected(each.rate, length) for each, length in zip(candidates, lengths, strict=True)])
        found = (num_seqs + gained) / (costs.plain + costs.drafts.of(sum(lengths)))
        if found <= speed:
            break
        speed, best = found, lengths
    return best if speed * costs.best > num_seqs else [0] * len(candidates)


def may_pay(num_seqs: int, most: int, costs: Costs, max_tokens: int) -> bool:
    """Whether drafts of up to `most` tokens can be faster, however good they are."""
    num_tokens = min(num_seqs * most, max_tokens)
    return num_tokens / num_seqs > costs.drafts.of(num_tokens) / costs.plain


def longest_of(lengths: Sequence[int], max_tokens: int) -> int:
    """The length to which the longest must be cut for that sum, as far as each keeps a token."""
    longest, total = max(lengths, default=0), sum(lengths)
    if total <= max_tokens:
        return longest
    counts, num_cut = Counter(lengths), 0
    while longest > 1 and total > max_tokens:
        num_cut += counts[longest]
        total -= num_cut
        longest -= 1
    return longest


def _worth_their_time(candidates: Sequence[Candidate], least: float) -> list[int]:
    if least <= 0.0:
        return [each.most for each in candidates]
    if least >= 1.0:
        return [0] * len(candidates)
    log = math.log(least)
    return [min(each.most, int(log / math.log(min(each.rate, CERTAIN)))) for each in candidates]


def _expected(rate: float, length: int) -> float:
    """Tokens that are chosen."""
    rate = min(rate, CERTAIN)
    return rate * (1.0 - rate**length) / (1.0 - rate)
