"""The number of replicas, from the requests under way and the use of the KV caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Context(Protocol):
    """The part of Serve's AutoscalingContext that is used; metrics are by name and replica."""

    current_num_replicas: int
    total_num_requests: float

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class QueueAndCachePolicy:
    """As many replicas as bring the fuller of two measures to its target: requests under way, and KV cache in use.

    Serve applies its own bounds, factors and delays to the result.

    Args:
        under_way: of one replica.
        cache_use: mean share of KV blocks that requests hold, 0 to 1.
    """

    def __init__(self, under_way: float = 64.0, cache_use: float = 0.7) -> None:
        self._under_way = under_way
        self._cache_use = cache_use

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        uses = list(metrics.get("cache_use", {}).values())
        mean_use = sum(uses) / len(uses) if uses else 0.0
        by_requests = context.total_num_requests / self._under_way
        by_cache = context.current_num_replicas * mean_use / self._cache_use
        return max(by_requests, by_cache), {}
