"""When requests are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Arrival:
    """By default all at once, which `max_concurrency` turns into a fixed number under way.

    Attributes:
        request_rate: requests per second; infinite: each as soon as a place is free.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, smaller comes in bursts,
            larger is more even, infinite a constant rate.
        max_concurrency: most requests under way; None: no bound.
        max_seconds: no request is sent later; None: no bound.
        ramp: how the rate goes from `ramp_start` to `ramp_end` requests per second in place of `request_rate`.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp: Literal["linear", "exponential"] | None = None
    ramp_start: float = 0.0
    ramp_end: float = 0.0
    max_seconds: float | None = None

    def times(self, num_prompts: int, seed: int) -> npt.NDArray[np.float64]:
        """[num_prompts] seconds after the start, ascending.

        The gaps are scaled so that together they take the time that the rates ask for: a short run with an unlucky
        draw would else have another rate than the one it reports.
        """
        rates = self._rates(num_prompts)
        if np.isinf(rates).all():
            return np.zeros(num_prompts)
        gaps = 1 / rates
        if math.isfinite(self.burstiness):
            drawn = gaps * np.random.default_rng([seed, 1]).gamma(self.burstiness, 1 / self.burstiness, num_prompts)
            gaps = drawn * (gaps.sum() / drawn.sum())
        return np.asarray(np.cumsum(gaps) - gaps[0])

    def _rates(self, num_prompts: int) -> npt.NDArray[np.float64]:
        if self.ramp is None:
            return np.full(num_prompts, self.request_rate)
        done = np.linspace(0, 1, num_prompts)
        if self.ramp == "linear":
            return np.asarray(self.ramp_start + (self.ramp_end - self.ramp_start) * done, np.float64)
        return np.asarray(self.ramp_start * (self.ramp_end / self.ramp_start) ** done)
