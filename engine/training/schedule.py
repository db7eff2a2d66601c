"""Learning rates over the steps of a training, as shares of the peak."""

from __future__ import annotations

import math
from typing import Literal

ScheduleName = Literal["cosine", "linear", "constant", "hold"]
HELD_SHARE = 0.4  # of the steps, at the peak, before `hold` falls


def share_of_peak(name: ScheduleName, step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Of step 0..num_steps-1: up linearly in the warm-up, then as the name says, which ends near 0.

    cosine: half a cosine wave (Loshchilov and Hutter 2017). linear: a straight line. hold: level, the last 60 % of all
    steps a straight line. constant: level to the end.
    """
    warm = min(1.0, (step + 1) / num_warmup_steps) if num_warmup_steps else 1.0
    if name == "constant":
        return warm
    if name == "hold":
        return min(warm, (num_steps - step) / ((1 - HELD_SHARE) * num_steps))
    if step < num_warmup_steps:
        return warm
    done = (step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * done)) if name == "cosine" else 1 - done
