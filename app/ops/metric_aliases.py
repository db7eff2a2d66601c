"""Metrics under the names that other servers have for them, so that their dashboards find all that they read.

With `--metrics-prefix vllm` or `sglang` they come beside Tessera's own names, which are mostly vLLM's anyway. Sources:
vLLM's examples/observability (before 0.11: examples/online_serving/prometheus_grafana) and vllm/v1/metrics/loggers.py;
SGLang's examples/monitoring and docs/references/production_metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tessera.engine.contract.messages import EngineInfo
from tessera.engine.ipc.client import EngineClient

VLLM, SGLANG = "vllm", "sglang"
# Prefix -> the other server's name -> the engine's, both without prefix and, for counters, without _total.
ALIASES: Mapping[str, Mapping[str, str]] = {
    VLLM: {  # its names until 0.10
        "gpu_cache_usage_perc": "kv_cache_usage_perc",
        "gpu_prefix_cache_queries": "prefix_cache_queries",
        "gpu_prefix_cache_hits": "prefix_cache_hits",
        "time_per_output_token_seconds": "inter_token_latency_seconds",
    },
    SGLANG: {
        "num_running_reqs": "num_requests_running",
        "num_queue_reqs": "num_requests_waiting",
        "token_usage": "kv_cache_usage_perc",
        "cached_tokens": "prompt_tokens_cached",
        "num_requests": "request_success",
        "queue_time_seconds": "request_queue_time_seconds",
        "time_per_output_token_seconds": "inter_token_latency_seconds",
    },
}
FAMILY = re.compile(rb"^# HELP tessera:(\w+?)(?:_total)? .*\n(?:(?!# HELP ).*\n)*", re.MULTILINE)
THROUGHPUT_SECONDS = 2.0  # that the current throughput is taken from


def with_aliases(text: bytes, prefix: str) -> bytes:
    """The engine's metrics, followed by those that have another name with this prefix; all have the engine's prefix."""
    names: dict[bytes, list[bytes]] = {}
    for alias, name in ALIASES.get(prefix, {}).items():
        names.setdefault(name.encode(), []).append(alias.encode())
    copies = [
        re.sub(rb"tessera:%b\b|tessera:%b(?=_)" % (family[1], family[1]), b"tessera:" + alias, family[0])
        for family in FAMILY.finditer(text)
        for alias in names.get(family[1], ())
    ]
    return b"".join([text, *copies])


class DerivedGauges:
    """What another server computes itself and Tessera leaves to the reader; nothing with Tessera's own prefix."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self, prefix: str) -> Iterator[Metric]:
        if self._client.info is None or not self._client.history:
            return
        if prefix == VLLM:
            yield from self._vllm()
        elif prefix == SGLANG:
            yield from self._sglang(self._client.info)

    def _vllm(self) -> Iterator[Metric]:
        """One engine, which never sleeps and defers nothing."""
        num_waiting = self._client.history[-1][1].num_waiting
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._family(f"{VLLM}:engine_sleep_state", "1 for the engine's state.", "sleep_state", states)
        reasons = {"capacity": num_waiting, "deferred": 0}
        yield self._family(f"{VLLM}:num_requests_waiting_by_reason", "Requests in the queue.", "reason", reasons)

    def _family(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=["model_name", label])
        for value, number in values.items():
            family.add_metric([self._model_name, value], number)
        return family

    def _sglang(self, info: EngineInfo) -> Iterator[Metric]:
        history = self._client.history
        now, stats = history[-1]
        then, before = next(each for each in history if each[0] >= now - THROUGHPUT_SECONDS)
        if stats.totals is None or before.totals is None:
            return
        totals, num_new = stats.totals, stats.totals.num_generation_tokens - before.totals.num_generation_tokens
        values = {
            "gen_throughput": ("Tokens generated a second.", num_new / (now - then) if now > then else 0.0),
            "cache_hit_rate": (
                "Share of prompt tokens that the prefix cache had.",
                totals.num_prefix_hits / max(totals.num_prefix_queries, 1),
            ),
            "num_used_tokens": ("Tokens in KV blocks in use.", stats.num_used_blocks * info.block_size),
            "max_total_num_tokens": ("Tokens in all KV blocks.", info.num_kv_blocks * info.block_size),
        }
        for name, (documentation, value) in values.items():
            family = GaugeMetricFamily(f"{SGLANG}:{name}", documentation, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
