"""The metrics that the dashboards of vLLM and SGLang read, under the names that those servers have for them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tessera.app.ops.metric_aliases import ALIASES
from tessera.engine.contract.messages import EngineTotals, SchedulerStats
from tessera.engine.core.metrics import EngineMetrics
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.dashboard_queries import OTHER_NAMES, SGLANG_QUERIES, VLLM_QUERIES
from tests.support.servers.http_fixtures import call, ids, settings_for, write_model_folder


class ClientWithMetrics(FakeClient):
    async def metrics(self) -> bytes:
        return EngineMetrics("tiny").render(SchedulerStats(3, 2, 5, 1, 4))


def stats(num_generated: int) -> SchedulerStats:
    totals = EngineTotals(
        num_prompt_tokens=10,
        num_generation_tokens=num_generated,
        num_prefix_queries=8,
        num_prefix_hits=2,
        num_preemptions=0,
        num_finished={},
        time_to_first_token=[],
        inter_token_latency=[],
        e2e_latency=[],
    )
    return SchedulerStats(3, 2, 5, 1, 4, totals)


def served(folder: Path, prefix: str) -> dict[str, Sample]:
    client = ClientWithMetrics(always(play(ids("hello"))))
    client.history.extend([(1.0, stats(0)), (9.0, stats(100)), (10.0, stats(150))])
    text = call(client, settings_for(write_model_folder(folder), metrics_prefix=prefix), "GET", "/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "a family comes once"
    return {sample.name: sample for family in families for sample in family.samples}


@pytest.mark.parametrize(("prefix", "queries"), [("vllm", VLLM_QUERIES), ("sglang", SGLANG_QUERIES)])
def test_every_metric_of_the_other_servers_dashboards_is_found(tmp_path: Path, prefix: str, queries: list[str]) -> None:
    samples = served(tmp_path, prefix)
    wanted = {name for query in queries for name in re.findall(rf"{prefix}:\w+", query)}
    assert len(wanted) > 5
    assert wanted | {f"{prefix}:{name}" for name in OTHER_NAMES[prefix]} <= samples.keys()
    for query in queries:
        for name, label in re.findall(rf"({prefix}:\w+)\{{(model_name)=", query):
            assert samples[name].labels[label] == "tiny"


def test_aliases_and_derived_gauges_have_the_values_of_what_they_stand_for(tmp_path: Path) -> None:
    samples = served(tmp_path, "sglang")
    for alias, value in (
        *(("num_running_reqs", 3.0), ("num_queue_reqs", 2.0), ("token_usage", 0.4)),
        *(("gen_throughput", 50.0), ("cache_hit_rate", 0.25), ("num_requests_running", 3.0)),
    ):
        assert samples[f"sglang:{alias}"].value == value, alias
    info = FakeClient(always([])).info
    assert info is not None
    assert samples["sglang:num_used_tokens"].value == 4 * info.block_size


def test_to_vllms_dashboards_the_engine_is_awake_and_its_queue_waits_for_room(tmp_path: Path) -> None:
    client = ClientWithMetrics(always(play(ids("hello"))))
    client.history.append((1.0, stats(0)))
    text = call(client, settings_for(write_model_folder(tmp_path), metrics_prefix="vllm"), "GET", "/metrics").text
    assert '\nvllm:engine_sleep_state{model_name="tiny",sleep_state="awake"} 1.0\n' in text
    assert '\nvllm:num_requests_waiting_by_reason{model_name="tiny",reason="capacity"} 2.0\n' in text


def test_every_app_process_describes_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_of(**settings: int) -> float:
        client = ClientWithMetrics(always(play(ids("hello"))))
        text = call(client, settings_for(write_model_folder(tmp_path), **settings), "GET", "/metrics").text
        (sample,) = re.findall(r"^process_start_time_seconds (\S+)$", text, re.MULTILINE)
        return float(sample)

    first = start_of()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert start_of(app_process=1, num_app_processes=2) < first


def test_with_its_own_prefix_tessera_has_its_own_names_alone(tmp_path: Path) -> None:
    names = {name.partition(":")[2] for name in served(tmp_path, "tessera")}
    for aliases in ALIASES.values():
        assert not names & aliases.keys()
