"""Metrics of each of the ranks that share a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from tessera.engine.collectives.rendezvous import RankState

LABELS = ["model_name", "rank"]


class RankMetrics(CollectorRegistry):
    """Reads what the ranks know of themselves, when asked."""

    def __init__(
        self, model_name: str, states: Sequence[RankState], weight_bytes: Sequence[int], kv_cache_bytes: Sequence[int]
    ) -> None:
        super().__init__(auto_describe=False)
        self._model_name = model_name
        self._states, self._weight_bytes, self._kv_cache_bytes = states, weight_bytes, kv_cache_bytes

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self)

    def collect(self) -> list[Metric]:
        gauges: list[tuple[str, str, Callable[[int], float]]] = [
            ("tessera:rank_weight_bytes", "Bytes of a rank's weights.", self._weight_bytes.__getitem__),
            ("tessera:rank_kv_cache_bytes", "Bytes of a rank's KV cache.", self._kv_cache_bytes.__getitem__),
        ]
        counters: list[tuple[str, str, Callable[[int], float]]] = [
            ("tessera:rank_steps", "Steps that a rank took.", lambda rank: self._states[rank].steps),
            (
                "tessera:rank_wait_seconds",
                "Time that a rank's thread waited for the others, in seconds.",
                lambda rank: self._states[rank].wait_seconds,
            ),
        ]
        families: list[Metric] = []
        for kind, listed in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in listed:
                family = kind(name, text, labels=LABELS)
                for rank in range(len(self._states)):
                    family.add_metric([self._model_name, str(rank)], value(rank))
                families.append(family)
        return families
