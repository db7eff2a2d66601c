"""Metrics of the keys of the keys file; their number is bounded by that of the file's entries."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from tessera.app.keys.key_ring import KeyRing
from tessera.app.limits.key_use import Cell, KeyUse

COUNTERS = {
    Cell.NUM_REQUESTS: ("key_requests", "Requests of a key."),
    Cell.NUM_REFUSED: ("key_requests_refused", "Requests of a key that were refused by one of its limits."),
    Cell.NUM_PROMPT_TOKENS: ("key_prompt_tokens", "Tokens of a key's prompts, cached ones included, and of inputs."),
    Cell.NUM_GENERATED_TOKENS: ("key_generation_tokens", "Tokens generated for a key."),
}
GAUGES = {
    Cell.REQUESTS_UNDER_WAY: ("key_requests_under_way", "Requests of a key under way."),
    Cell.SEQUENCES_UNDER_WAY: ("key_sequences_under_way", "Sequences of a key under way."),
}


class KeyMetrics:
    """The use of each key, of all app processes."""

    def __init__(self, ring: KeyRing | None, use: KeyUse) -> None:
        self._ring = ring
        self._use = use

    def collect(self, prefix: str) -> Iterator[Metric]:
        if self._ring is None or not self._ring.named:
            return
        for kind, cells in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for cell, (name, documentation) in cells.items():
                family = kind(f"{prefix}:{name}", documentation, labels=["key"])
                for key in self._ring.named:
                    family.add_metric([key.name], self._use.total(key.slot, cell))
                yield family
