"""What a dashboard reads: names, labels and values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tessera.engine.contract.histogram import quantile
from tessera.engine.contract.histogram_counts import Histogram
from tessera.engine.contract.messages import SchedulerStats
from tessera.engine.core.metrics import EngineMetrics
from tessera.engine.cuda.inspection.nvml import Usage, UsageMonitor
from tests.support.fakes.fake_runner import CLIENT, NON_FINITE, Harness
from tests.wire.points import COUNTERS, GAUGES, HISTOGRAMS


def read(text: bytes) -> dict[tuple[str, str], float]:
    """(sample name, its label besides model_name) -> value."""
    samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert "model_name" in sample.labels
            samples[sample.name, "".join(labels.values())] = sample.value
    return samples


def test_wire_metrics_are_all_there_from_the_start() -> None:
    text = EngineMetrics("m").render(SchedulerStats(0, 0, 1, 0, 0))
    samples = read(text)
    names = {name for name, _ in samples}
    assert {f"tessera:{gauge}" for gauge in GAUGES} <= names
    assert {f"tessera:{counter}_total" for counter in COUNTERS} <= names
    assert {f"tessera:{histogram}_{part}" for histogram in HISTOGRAMS for part in ("bucket", "count", "sum")} <= names
    for reason in ("stop", "length", "abort", "error"):
        assert samples["tessera:request_success_total", reason] == 0


def test_wire_metrics_have_the_prefix_and_the_model_name_of_the_server() -> None:
    text = EngineMetrics('odd "name"\n', prefix="vllm:").render(SchedulerStats(3, 2, 5, 1, 4)).decode()
    assert "tessera" not in text
    assert 'vllm:num_requests_running{model_name="odd \\"name\\"\\n"} 3.0' in text
    assert read(text.encode())["vllm:kv_cache_usage_perc", ""] == 0.4


def test_fault_tenant_isolation_metrics_do_not_name_fine_tuned_models() -> None:
    metrics = EngineMetrics("m")
    seats: Any = SimpleNamespace(num_slots=2, num_in_slots=0, catalog=Catalog())
    metrics.watch_adapters(seats, lambda: ({"ft:m:alice:plans:1", "ft:m:bob::2", "spelling"}, set()))
    text = metrics.render(SchedulerStats(0, 0, 1, 0, 0)).decode()
    assert 'running_lora_adapters="ft:,spelling"' in text
    assert "alice" not in text


class Catalog(list[Any]):
    num_in_memory = 0


def test_a_value_counts_in_its_bucket_and_all_above() -> None:
    histogram = Histogram("", (1, 2, 5))
    histogram.observe_many([0.5, 1.0, 1.5])
    histogram.observe_many([])
    histogram.observe(2.0)
    histogram.observe(7.0)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 4), ("5.0", 4), ("+Inf", 5)]
    assert histogram.count == 5
    assert histogram.total == pytest.approx(12.0)


def test_observing_many_is_observing_each() -> None:
    values = np.random.default_rng(7).exponential(3.0, 200).tolist()
    one_by_one, at_once = Histogram("", (1, 2, 5)), Histogram("", (1, 2, 5))
    for value in values:
        one_by_one.observe(value)
    at_once.observe_many(values)
    assert one_by_one.cumulative() == at_once.cumulative()
    assert one_by_one.total == pytest.approx(at_once.total)


def test_a_requests_times_and_tokens_add_up() -> None:
    engine = Harness(max_num_seqs=1, block_size=4, max_num_batched_tokens=8)
    prompt = list(range(1, 13))
    engine.add("first", prompt, 3, ignore_eos=True)
    engine.add("second", prompt, 2, ignore_eos=True)
    engine.now += 1.0
    for _ in range(4):  # two chunks, then two decodes
        engine.step(0.5)
    samples = read(engine.core.render_metrics())
    assert samples["tessera:num_requests_running", ""] == 0
    assert samples["tessera:num_requests_waiting", ""] == 1
    engine.run()
    samples = read(engine.core.render_metrics())

    def observed(name: str) -> tuple[float, float]:
        return samples[f"tessera:{name}_count", ""], round(samples[f"tessera:{name}_sum", ""], 9)

    # The fake clock moves before a step, so a step's tokens come at the time of its schedule.
    assert observed("request_queue_time_seconds") == (2, 4.51)
    assert observed("request_prefill_time_seconds") == (2, 0.5)
    assert observed("time_to_first_token_seconds") == (2, 5.01)
    assert observed("inter_token_latency_seconds") == (3, 1.01)
    assert observed("request_decode_time_seconds") == (2, 1.01)
    assert observed("e2e_request_latency_seconds") == (2, 6.02)
    assert observed("request_prompt_tokens") == (2, 24)
    assert observed("request_generation_tokens") == (2, 5)
    assert observed("iteration_tokens_total") == (6, 19)
    assert samples["tessera:prompt_tokens_total", ""] == 24
    assert samples["tessera:generation_tokens_total", ""] == 5
    assert samples["tessera:prompt_tokens_cached_total", ""] == 8
    assert samples["tessera:prefix_cache_queries_total", ""] == 24
    assert samples["tessera:prefix_cache_hits_total", ""] == 8
    assert samples["tessera:request_success_total", "length"] == 2


def test_how_requests_ended_and_preemptions_are_counted() -> None:
    engine = Harness(num_blocks=6, block_size=4, prefix_caching=False)
    engine.add("aborted", [1, 2])
    engine.add("failing", [NON_FINITE, 1, 2, 3, 4, 5, 6])
    engine.step()
    engine.core.abort(["aborted"], CLIENT)
    engine.add("a", [1, 2, 3, 4], 15, ignore_eos=True)
    engine.add("b", [1, 2, 3, 4], 15, ignore_eos=True)
    engine.run()
    samples = read(engine.core.render_metrics())
    reasons = {reason: samples["tessera:request_success_total", reason] for reason in ("abort", "error", "length")}
    assert reasons == {"abort": 1, "error": 1, "length": 2}
    assert samples["tessera:num_preemptions_total", ""] >= 1
    assert samples["tessera:prefix_cache_queries_total", ""] == 2 + 7 + 4 + 4, "a request counts once"
    assert samples["tessera:e2e_request_latency_seconds_count", ""] == 2, "only those that ended by themselves"


def test_kv_blocks_are_told_by_state() -> None:
    samples = read(EngineMetrics("m").render(SchedulerStats(3, 2, 5, 1, 4)))
    assert {state: samples["tessera:kv_cache_blocks", state] for state in ("free", "cached", "used")} == {
        "free": 5,
        "cached": 1,
        "used": 4,
    }


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([4, 0, 0, 0], 0.5, 0.5),
        ([1, 2, 1, 0], 0.5, 1.5),
        ([1, 2, 1, 0], 0.75, 2.0),
        ([0, 0, 2, 0], 0.99, 2 + 3 * 0.99),
        ([0, 0, 0, 5], 0.5, 5.0),
    ],
)
def test_quantiles_are_those_of_promql(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile((1, 2, 5), counts, share) == (expected if expected is None else pytest.approx(expected))


def test_heartbeats_carry_the_totals() -> None:
    engine = Harness(max_num_seqs=1, block_size=4)
    engine.add("one", [1, 2, 3], 3, ignore_eos=True)
    engine.run()
    totals = engine.core.stats().totals
    assert totals is not None
    assert (totals.num_prompt_tokens, totals.num_generation_tokens) == (3, 3)
    assert totals.num_finished["length"] == 1
    assert (sum(totals.time_to_first_token), sum(totals.inter_token_latency), sum(totals.e2e_latency)) == (1, 2, 1)


def test_a_gpu_is_watched_without_holding_anybody_up() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def look() -> Usage:
        begun.set()
        assert go_on.wait(10)
        return Usage(1, 2, None)

    monitor = UsageMonitor(open_device=lambda index: look)
    monitor.start()
    assert begun.wait(10)
    assert monitor.latest is None, "the driver has not answered yet"
    go_on.set()
    monitor.stop()
    assert monitor.latest == (1, 2, None)


def test_without_nvml_nothing_is_known_and_nothing_fails() -> None:
    def missing(index: int) -> Callable[[], Usage]:
        raise RuntimeError("no such library")

    monitor = UsageMonitor(open_device=missing)
    monitor.start()
    monitor.stop()
    assert monitor.latest is None
