"""Counts of the KV tiers, under vLLM's names where it has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TO_HOST, TO_DEVICE, TO_DISK, FROM_DISK = "GPU_to_CPU", "CPU_to_GPU", "CPU_to_disk", "disk_to_CPU"


class TierMetrics(Collector):
    """Counts since the engine's start.

    Attributes:
        num_queries, num_hits: prompt tokens looked up beyond the device, and brought back.
        num_bytes: copied, by transfer type.
        failures: by reason.
    """

    def __init__(self, model_name: str = "", prefix: str = "tessera:") -> None:
        self._model_name = model_name
        self._prefix = prefix
        self.num_queries = 0
        self.num_hits = 0
        self.num_bytes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.gauges: Callable[[], dict[str, dict[str, int]]] = dict
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name, documentation, value in (
            ("external_prefix_cache_queries", "Tokens looked up in host memory and on disk.", self.num_queries),
            ("external_prefix_cache_hits", "Tokens brought back from there.", self.num_hits),
        ):
            counter = CounterMetricFamily(self._prefix + name, documentation, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        for name, label, documentation, counts in (
            ("kv_offload_total_bytes", "transfer_type", "Bytes of KV blocks copied, by direction.", self.num_bytes),
            ("kv_offload_failures", "reason", "Faults of the KV tiers, by reason.", self.failures),
        ):
            counter = CounterMetricFamily(self._prefix + name, documentation, labels=["model_name", label])
            for value_of_label, count in sorted(counts.items()):
                counter.add_metric([self._model_name, value_of_label], count)
            yield counter
        documentations = {
            "blocks": "KV blocks kept, by tier.",
            "capacity_blocks": "KV blocks that there is room for, by tier.",
            "up": "1 while a tier is in use, 0 after a fault.",
        }
        for name, by_tier in self.gauges().items():
            gauge = GaugeMetricFamily(
                f"{self._prefix}kv_offload_{name}", documentations[name], labels=["model_name", "tier"]
            )
            for tier, value in by_tier.items():
                gauge.add_metric([self._model_name, tier], value)
            yield gauge
