"""The last hour as points of a quarter of a minute each, for the dashboard's charts."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise
from typing import Any

from tessera.app.engines.model_client import ModelClient
from tessera.engine.contract.histogram import SECONDS_PER_TOKEN, SECONDS_TO_FIRST_TOKEN, quantile
from tessera.engine.contract.messages import EngineTotals, SchedulerStats

SPAN = 3600.0  # seconds
INTERVAL = 15.0


class HourHistory:
    """Samples of the engine's heartbeats, bounded by their number."""

    def __init__(self, client: ModelClient) -> None:
        self._client = client
        self._samples: deque[tuple[float, SchedulerStats]] = deque(maxlen=int(SPAN / INTERVAL) + 1)
        self._object: dict[str, Any] | None = None  # made when asked for, once for each sample
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sample every INTERVAL from now on."""
        self.sample()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self.start)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sample(self) -> None:
        history = self._client.history
        if not history or (self._samples and history[-1][0] <= self._samples[-1][0]):
            return
        self._samples.append(history[-1])
        self._object = None

    def as_object(self) -> dict[str, Any]:
        """Points with their age in seconds, the oldest first; latencies are medians, None where there were none."""
        if self._object is None:
            points = [_point(*pair, self._samples[-1][0]) for pair in pairwise(self._samples)]
            self._object = {"seconds": SPAN, "points": [point for point in points if point is not None]}
        return self._object


def _point(
    earlier: tuple[float, SchedulerStats], later: tuple[float, SchedulerStats], now: float
) -> dict[str, float | None] | None:
    (begin, before), (end, after) = earlier, later
    first, last = before.totals, after.totals
    if first is None or last is None or _num_finished(last) < _num_finished(first):
        return None  # the engine was started again in between
    seconds = end - begin
    blocks = after.num_used_blocks + after.num_cached_blocks + after.num_free_blocks
    return {
        "age": round(now - end, 1),
        "prompt_tokens": round((last.num_prompt_tokens - first.num_prompt_tokens) / seconds, 2),
        "generation_tokens": round((last.num_generation_tokens - first.num_generation_tokens) / seconds, 2),
        "requests": round((_num_finished(last) - _num_finished(first)) / seconds, 3),
        "running": after.num_running,
        "waiting": after.num_waiting,
        "kv_usage": round(after.num_used_blocks / blocks, 4) if blocks else 0.0,
        "ttft": _median(SECONDS_TO_FIRST_TOKEN, first.time_to_first_token, last.time_to_first_token),
        "itl": _median(SECONDS_PER_TOKEN, first.inter_token_latency, last.inter_token_latency),
    }


def _median(bounds: tuple[float, ...], before: list[int], after: list[int]) -> float | None:
    return quantile(bounds, [late - early for early, late in zip(before, after, strict=True)], 0.5)


def _num_finished(totals: EngineTotals) -> int:
    return sum(totals.num_finished.values())
