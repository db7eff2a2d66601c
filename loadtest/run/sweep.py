"""Sweeps: the highest request rate within the limits, and the number of requests under way that saturates a server."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PRECISION = 0.04  # the search ends when its bounds are this close, relative to the upper one
MAX_LEVELS = 16
LOWEST = 0.001  # of the throughput at full load: a server that misses its limits there is searched no further
STEP_UP = 1.25  # to the next rate, while every rate so far was met
MIN_GAIN = 0.05  # of throughput, for twice the requests under way; a server that gains less is saturated
MAX_CONCURRENCY = 4096  # of a sweep that chooses its levels itself


@dataclass(frozen=True)
class Level:
    """One load that was tried.

    Attributes:
        request_rate: asked for, requests per second. Infinite: all as soon as places are free.
        concurrency: requests under way, of a sweep over these; None: of a sweep over rates.
        met: enough requests kept to the limits, and the server to the rate.
    """

    request_rate: float
    summary: dict[str, Any]
    met: bool
    concurrency: int | None = None

    @property
    def throughput(self) -> float:
        """Requests per second that were reached, without the beginning and the end of the run."""
        steady = float(self.summary["steady_request_throughput"] or self.summary["request_throughput"])
        if math.isinf(self.request_rate):
            return steady
        return self.request_rate if not self.summary["saturated"] else min(steady, self.request_rate)


def search(measure: Callable[[float], dict[str, Any]], target: float) -> Iterator[Level]:
    """Try rates around the throughput at full load, which is measured first, and bisect.

    A rate that the server does not keep up with is not met, even where the run ends before its growing queue breaks
    the limits. The lowest rate that was not met is tried a second time before the search ends, because other work on
    the server's machine may have disturbed it; if it is met then, the search goes on above it.

    Args:
        measure: runs the load at a rate; -> its summary with `goodput_share`.
        target: share of the requests that must keep to the limits.
    """

    def level(rate: float) -> Level:
        summary = measure(rate)
        keeps_up = math.isinf(rate) or not summary["saturated"]
        return Level(rate, summary, summary["goodput_share"] >= target and keeps_up)

    full = level(math.inf)
    yield full
    rate = max(full.throughput, float(full.summary["request_throughput"]))
    low, missed, confirmed = 0.0, [math.inf], math.inf
    if rate == 0 or full.summary["interrupted"]:
        return
    for _ in range(MAX_LEVELS - 1):
        tried = level(rate)
        yield tried
        if tried.met:
            low = rate
            missed = [other for other in missed if other > rate]
        elif rate == missed[-1]:
            confirmed = rate
        else:
            missed.append(rate)
        high = missed[-1]
        converged = high - low <= PRECISION * high < math.inf
        too_low = not low and high < LOWEST * full.throughput
        if tried.summary["interrupted"] or too_low or (converged and confirmed == high):
            return
        rate = high if converged else rate * STEP_UP if high == math.inf else (low + high) / 2


def best(levels: Sequence[Level]) -> Level | None:
    """The highest finite rate that met the target."""
    met = [level for level in levels if level.met and level.request_rate != math.inf]
    return max(met, key=lambda level: level.request_rate, default=None)


def sweep_concurrency(measure: Callable[[int], dict[str, Any]], given: Sequence[int], target: float) -> Iterator[Level]:
    """Try the given numbers of requests under way; without any 1, 2, 4, ... until the throughput grows no more.

    Args:
        measure: runs the load with so many under way; -> its summary, with `goodput_share` where there are limits.
        target: share of the requests that must keep to the limits.
    """
    highest, concurrency = 0.0, 1
    for number in given or itertools.repeat(0):
        concurrency = number or concurrency
        summary = measure(concurrency)
        level = Level(math.inf, summary, summary.get("goodput_share", 1.0) >= target, concurrency)
        yield level
        if summary["interrupted"]:
            return
        if not given:
            if level.throughput < (1 + MIN_GAIN) * highest or not summary["completed"]:
                return
            highest = max(highest, level.throughput)
            concurrency *= 2
            if concurrency > MAX_CONCURRENCY:
                return


def saturation(levels: Sequence[Level]) -> Level | None:
    """The fewest requests under way that come within `MIN_GAIN` of the highest throughput.

    None where the throughput still grows at the last level.
    """
    ordered = sorted(levels, key=lambda level: level.concurrency or 0)
    highest = max((level.throughput for level in ordered), default=0.0)
    found = next((level for level in ordered if level.throughput * (1 + MIN_GAIN) >= highest > 0), None)
    return found if found is not None and found is not ordered[-1] else None


def most_within(levels: Sequence[Level]) -> Level | None:
    """The most requests under way of which enough, as of all fewer, kept to the limits."""
    within = None
    for level in sorted(levels, key=lambda level: level.concurrency or 0):
        if not level.met:
            break
        within = level
    return within
