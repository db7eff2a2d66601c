"""The buckets of histograms, and quantiles of counts by bucket."""

from __future__ import annotations

from collections.abc import Sequence

SECONDS_TO_FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
SECONDS_PER_TOKEN = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
SECONDS_PER_REQUEST = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
SECONDS_OF_DELAY = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.2),
    *(0.5, 1, 2.5, 5, 10, 30),
)
TOKENS_PER_REQUEST = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
CHOICES_PER_REQUEST = (1, 2, 5, 10, 20, 50, 100)
TOKENS_PER_STEP = tuple(2**e for e in range(16))


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of all values lie, interpolated linearly in its bucket like PromQL's
    histogram_quantile; the last bound for values beyond it, None without values."""
    wanted = share * sum(counts)
    if wanted <= 0:
        return None
    below = 0
    for index, count in enumerate(counts[: len(bounds)]):
        if count and below + count >= wanted:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (wanted - below) / count
        below += count
    return float(bounds[-1])
