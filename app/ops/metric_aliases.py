"""Metrics under the names that other servers have for them, so that their dashboards find all that they read.

With `--metrics-prefix vllm` or `sglang` they come beside Tessera's own names, which are mostly vLLM's anyway. Sources:
vLLM's examples/observability (before 0.11: examples/online_serving/prometheus_grafana) and vllm/v1/metrics/loggers.py;
SGLang's examples/monitoring and docs/references/production_metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tessera.app.engines.engines import Engine, Engines
from tessera.app.engines.model_client import ModelClient

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
    """Gauges that another server has and Tessera leaves to the reader; none with Tessera's own prefix.

    Args:
        names: of the engines' models, in their order.
    """

    def __init__(self, engines: Engines, names: Sequence[str]) -> None:
        self._engines = list(zip(engines, names, strict=True))

    def collect(self, prefix: str) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for engine, name in self._engines:
            found = _vllm(engine) if prefix == VLLM else _sglang(engine.client) if prefix == SGLANG else ()
            for gauge in found:
                family = families.get(gauge.name)
                if family is None:
                    labels = ["model_name", *gauge.labels]
                    family = families[gauge.name] = GaugeMetricFamily(
                        f"{prefix}:{gauge.name}", gauge.documentation, labels=labels
                    )
                family.add_metric([name, *gauge.labels.values()], gauge.value)
        yield from families.values()


class Gauge(NamedTuple):
    name: str
    documentation: str
    value: float
    labels: Mapping[str, str]


def _vllm(engine: Engine) -> Iterator[Gauge]:
    """It defers nothing."""
    is_asleep = engine.status.state == "asleep"
    if not is_asleep and not engine.client.history:
        return
    is_kept = is_asleep and engine.status.in_host_memory
    states = {"awake": not is_asleep, "weights_offloaded": is_kept, "discard_all": is_asleep and not is_kept}
    for state, value in states.items():
        yield Gauge("engine_sleep_state", "1 for the engine's state.", int(value), {"sleep_state": state})
    if is_asleep:
        return
    num_waiting = engine.client.history[-1][1].num_waiting
    for reason, number in (("capacity", num_waiting), ("deferred", 0)):
        yield Gauge("num_requests_waiting_by_reason", "Requests in the queue.", number, {"reason": reason})


def _sglang(client: ModelClient) -> Iterator[Gauge]:
    info, history = client.info, client.history
    if info is None or not history:
        return
    now, stats = history[-1]
    then, before = next(each for each in history if each[0] >= now - THROUGHPUT_SECONDS)
    if stats.totals is None or before.totals is None:
        return
    totals, num_new = stats.totals, stats.totals.num_generation_tokens - before.totals.num_generation_tokens
    hit_rate = totals.num_prefix_hits / max(totals.num_prefix_queries, 1)
    yield Gauge("gen_throughput", "Tokens generated a second.", num_new / (now - then) if now > then else 0.0, {})
    yield Gauge("cache_hit_rate", "Share of prompt tokens that the prefix cache had.", hit_rate, {})
    yield Gauge("num_used_tokens", "Tokens in KV blocks in use.", stats.num_used_blocks * info.block_size, {})
    yield Gauge("max_total_num_tokens", "Tokens in all KV blocks.", info.num_kv_blocks * info.block_size, {})
