"""The highest request rate at which enough requests keep to the latencies asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PRECISION = 0.08  # the search ends when its bounds are this close, relative to the upper one
MAX_LEVELS = 10


@dataclass(frozen=True)
class Level:
    """One rate that was tried. Infinite: all requests as soon as places are free, which shows the most there is."""

    request_rate: float
    summary: dict[str, Any]
    met: bool


def search(measure: Callable[[float], dict[str, Any]], target: float) -> Iterator[Level]:
    """Try rates by bisection below the throughput at full load, which is measured first.

    No rate above that throughput is tried: the server cannot sustain it, though a short run may end before its
    growing queue breaks the limits.

    Args:
        measure: runs the load at a rate; -> its summary with `goodput_share`.
        target: share of the requests that must keep to the limits.
    """

    def level(rate: float) -> Level:
        summary = measure(rate)
        return Level(rate, summary, summary["goodput_share"] >= target)

    full = level(float("inf"))
    yield full
    rate = float(full.summary["request_throughput"])
    low, high = 0.0, rate
    if rate == 0 or full.summary["interrupted"]:
        return
    for _ in range(MAX_LEVELS - 1):
        tried = level(rate)
        yield tried
        low, high = (rate, high) if tried.met else (low, rate)
        if tried.summary["interrupted"] or high - low <= PRECISION * high:
            return
        rate = (low + high) / 2


def best(levels: list[Level]) -> Level | None:
    """The highest finite rate that met the target."""
    met = [level for level in levels if level.met and level.request_rate != float("inf")]
    return max(met, key=lambda level: level.request_rate, default=None)
