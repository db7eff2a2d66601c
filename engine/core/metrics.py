"""Counters, gauges and histograms of one engine, under the names that vLLM's dashboards read.

A step adds to plain numbers and NumPy buckets; Prometheus' own objects are made only when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tessera.engine.adapters.seats import AdapterSeats
from tessera.engine.contract.config import PRIVATE_PREFIX
from tessera.engine.contract.histogram import (
    CHOICES_PER_REQUEST,
    SECONDS_PER_REQUEST,
    SECONDS_PER_TOKEN,
    SECONDS_TO_FIRST_TOKEN,
    TOKENS_PER_REQUEST,
    TOKENS_PER_STEP,
)
from tessera.engine.contract.histogram_counts import Histogram
from tessera.engine.contract.messages import EngineTotals, FinishReason, SchedulerStats
from tessera.engine.core.sequence import Sequence
from tessera.engine.speculation.speculator import DraftCounts, Speculator

AdaptersInUse = Callable[[], tuple[set[str], set[str]]]  # -> names of those of running and of waiting sequences


class EngineMetrics(Collector):
    """Counts and latencies since the engine's start.

    Queue, prefill and first-token times are observed with a request's first token; decode and
    end-to-end times and token counts when it ends by itself ("stop" or "length").
    """

    def __init__(self, model_name: str, prefix: str = "tessera:") -> None:
        self._model_name = model_name
        self._prefix = prefix
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_prompt_tokens_cached = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_preemptions = 0
        self.num_finished: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.time_to_first_token = Histogram("Arrival to first token, in seconds.", SECONDS_TO_FIRST_TOKEN)
        self.inter_token_latency = Histogram("Between two tokens of a request, in seconds.", SECONDS_PER_TOKEN)
        self.e2e_latency = Histogram("Arrival to last token, in seconds.", SECONDS_PER_REQUEST)
        self.queue_time = Histogram("Arrival to first step, in seconds.", SECONDS_PER_REQUEST)
        self.prefill_time = Histogram("First step to first token, in seconds.", SECONDS_PER_REQUEST)
        self.decode_time = Histogram("First token to last token, in seconds.", SECONDS_PER_REQUEST)
        self.inference_time = Histogram("First step to last token, in seconds.", SECONDS_PER_REQUEST)
        self.time_per_output_token = Histogram("Mean time per token of a request after its first.", SECONDS_PER_TOKEN)
        self.params_n = Histogram("The parameter n of a request.", CHOICES_PER_REQUEST)
        self.params_max_tokens = Histogram("Most tokens that a sequence may generate.", TOKENS_PER_REQUEST)
        self.prompt_tokens = Histogram("Prompt tokens of a request.", TOKENS_PER_REQUEST)
        self.generation_tokens = Histogram("Generated tokens of a request.", TOKENS_PER_REQUEST)
        self.iteration_tokens = Histogram("Tokens computed in a step.", TOKENS_PER_STEP)
        self.speculator: Speculator | None = None
        self._stats: SchedulerStats | None = None
        self._adapters: tuple[AdapterSeats, AdaptersInUse] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def watch_adapters(self, seats: AdapterSeats, in_use: AdaptersInUse) -> None:
        """Report these too."""
        self._adapters = seats, in_use

    def record_arrival(self, num_choices: int, max_tokens: int) -> None:
        """A sequence of up to `max_tokens` tokens; `num_choices` is 0 except for the first of a request."""
        if num_choices:
            self.params_n.observe(num_choices)
        self.params_max_tokens.observe(max_tokens)

    def record_scheduled(self, num_tokens: int, admitted: list[Sequence], num_preempted: int) -> None:
        """A step of `num_tokens` tokens; `admitted` started with it, some again after a preemption."""
        self.iteration_tokens.observe(num_tokens)
        self.num_preemptions += num_preempted
        for sequence in admitted:
            if sequence.num_preemptions == 0:
                self.num_prefix_queries += sequence.num_prompt_tokens
                self.num_prefix_hits += sequence.num_cached_tokens

    def record_first_token(self, sequence: Sequence) -> None:
        assert sequence.first_scheduled_time is not None
        assert sequence.first_token_time is not None
        self.num_prompt_tokens += sequence.num_prompt_tokens
        self.num_prompt_tokens_cached += sequence.num_cached_tokens
        self.queue_time.observe(max(0.0, sequence.first_scheduled_time - sequence.arrival_time))
        self.prefill_time.observe(sequence.first_token_time - sequence.first_scheduled_time)
        self.time_to_first_token.observe(max(0.0, sequence.first_token_time - sequence.arrival_time))

    def record_tokens(self, num_tokens: int, token_gaps: list[float]) -> None:
        """`num_tokens` were generated; all but first tokens have a gap, in seconds, to the one before."""
        self.num_generation_tokens += num_tokens
        self.inter_token_latency.observe_many(token_gaps)

    def record_finished(self, sequence: Sequence, now: float) -> None:
        reason = sequence.finish_reason
        assert reason is not None
        self.num_finished[reason] += 1
        if reason in ("stop", "length"):
            assert sequence.first_token_time is not None
            self.e2e_latency.observe(max(0.0, now - sequence.arrival_time))
            self.decode_time.observe(now - sequence.first_token_time)
            self.inference_time.observe(now - (sequence.first_scheduled_time or sequence.first_token_time))
            if sequence.num_output_tokens > 1:
                seconds = (now - sequence.first_token_time) / (sequence.num_output_tokens - 1)
                self.time_per_output_token.observe(seconds)
            self.prompt_tokens.observe(sequence.num_prompt_tokens)
            self.generation_tokens.observe(sequence.num_output_tokens)

    def totals(self) -> EngineTotals:
        """The part that a status page shows, small enough for heartbeats."""
        return EngineTotals(
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            num_preemptions=self.num_preemptions,
            num_finished=dict(self.num_finished),
            time_to_first_token=self.time_to_first_token.counts,
            inter_token_latency=self.inter_token_latency.counts,
            e2e_latency=self.e2e_latency.counts,
            num_draft_tokens=self.speculator.num_draft_tokens if self.speculator is not None else 0,
            num_accepted_draft_tokens=self.speculator.num_accepted_tokens if self.speculator is not None else 0,
        )

    def render(self, stats: SchedulerStats) -> bytes:
        """Everything in Prometheus text format, with the gauges taken from `stats`."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        assert self._stats is not None, "only render() collects"
        yield from self._collect_gauges(self._stats)
        yield from self._collect_counters()
        if self._adapters is not None:
            yield from self._collect_adapters(*self._adapters)
        histograms = {
            "time_to_first_token_seconds": self.time_to_first_token,
            "inter_token_latency_seconds": self.inter_token_latency,
            "e2e_request_latency_seconds": self.e2e_latency,
            "request_queue_time_seconds": self.queue_time,
            "request_prefill_time_seconds": self.prefill_time,
            "request_decode_time_seconds": self.decode_time,
            "request_inference_time_seconds": self.inference_time,
            "request_time_per_output_token_seconds": self.time_per_output_token,
            "request_prompt_tokens": self.prompt_tokens,
            "request_generation_tokens": self.generation_tokens,
            "request_max_num_generation_tokens": self.generation_tokens,
            "request_params_n": self.params_n,
            "request_params_max_tokens": self.params_max_tokens,
            "iteration_tokens_total": self.iteration_tokens,
        }
        for name, histogram in histograms.items():
            family = HistogramMetricFamily(self._prefix + name, histogram.documentation, labels=["model_name"])
            family.add_metric([self._model_name], histogram.cumulative(), histogram.total)
            yield family

    def _collect_gauges(self, stats: SchedulerStats) -> Iterator[Metric]:
        num_blocks = stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks
        gauges = {
            "num_requests_running": ("Requests in the batch.", stats.num_running),
            "num_requests_waiting": ("Requests in the queue.", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", stats.num_used_blocks / num_blocks),
        }
        for name, (documentation, value) in gauges.items():
            family = GaugeMetricFamily(self._prefix + name, documentation, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        blocks = GaugeMetricFamily(
            self._prefix + "kv_cache_blocks",
            "KV blocks by state: in use, cached (kept for equal prefixes, given up when needed), free.",
            labels=["model_name", "state"],
        )
        states = {"used": stats.num_used_blocks, "cached": stats.num_cached_blocks, "free": stats.num_free_blocks}
        for state, value in states.items():
            blocks.add_metric([self._model_name, state], value)
        yield blocks

    def _collect_adapters(self, seats: AdapterSeats, in_use: AdaptersInUse) -> Iterator[Metric]:
        running, waiting = (",".join(sorted(set(map(_public_name, names)))) for names in in_use())
        info = GaugeMetricFamily(
            self._prefix + "lora_requests_info",
            "Unix time of this report; its labels are the adapters of running and of waiting requests, and how many "
            "fit on the device.",
            labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        info.add_metric([self._model_name, str(seats.num_slots), running, waiting], time.time())
        yield info
        places = GaugeMetricFamily(
            self._prefix + "lora_adapters",
            "Adapters by place: served at all, in host memory, in slots of the device.",
            labels=["model_name", "place"],
        )
        counts = {"all": len(list(seats.catalog)), "host": seats.catalog.num_in_memory, "device": seats.num_in_slots}
        for place, count in counts.items():
            places.add_metric([self._model_name, place], count)
        yield places

    def _collect_counters(self) -> Iterator[Metric]:
        counters = {
            "prompt_tokens": ("Prompt tokens of requests that got a first token.", self.num_prompt_tokens),
            "generation_tokens": ("Tokens generated.", self.num_generation_tokens),
            "prompt_tokens_cached": ("Prompt tokens spared by the prefix cache.", self.num_prompt_tokens_cached),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache.", self.num_prefix_queries),
            "prefix_cache_hits": ("Tokens found in the prefix cache.", self.num_prefix_hits),
            "num_preemptions": ("Times a request lost its blocks and had to wait again.", self.num_preemptions),
        }
        for name, (documentation, value) in counters.items():
            family = CounterMetricFamily(self._prefix + name, documentation, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        if self.speculator is not None:
            yield from self._collect_drafts(self.speculator)
        finished = CounterMetricFamily(
            self._prefix + "request_success",
            "Requests that ended, by finish_reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self.num_finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished

    def _collect_drafts(self, speculator: Speculator) -> Iterator[Metric]:
        by_source = sorted(speculator.by_source.copy().items())
        counters: dict[str, tuple[str, Callable[[DraftCounts], int]]] = {
            "spec_decode_num_drafts": ("Drafts verified.", lambda counts: counts.num_drafts),
            "spec_decode_num_draft_tokens": ("Draft tokens verified.", lambda counts: counts.num_tokens),
            "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", lambda counts: counts.num_accepted),
        }
        for name, (documentation, value) in counters.items():
            family = CounterMetricFamily(self._prefix + name, documentation, labels=["model_name", "method"])
            for source, counts in by_source:
                family.add_metric([self._model_name, source], value(counts))
            yield family
        by_position = CounterMetricFamily(
            self._prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in their draft.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(speculator.num_accepted_by_position):
            by_position.add_metric([self._model_name, str(position)], count)
        yield by_position


def _public_name(adapter: str) -> str:
    """Anybody may read metrics, and the names of fine-tuned models are for their keys alone."""
    return PRIVATE_PREFIX if adapter.startswith(PRIVATE_PREFIX) else adapter
