"""Sweeps: the rate and the number of requests under way that they find, and what is reported of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tessera.app.cli.command import main
from tessera.loadtest import bench
from tessera.loadtest.run.load_run import Outcome
from tessera.loadtest.run.summary import summarize
from tessera.loadtest.run.sweep import best, most_within, saturation, search, sweep_concurrency
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tessera.loadtest.workload.request_template import RequestTemplate
from tests.support.cases.load_outcomes import outcome
from tests.support.servers.load_page import check_page


def figures(throughput: float, share: float, *, saturated: bool = False) -> dict[str, Any]:
    return {
        "goodput_share": share,
        "request_throughput": throughput * 0.9,
        "steady_request_throughput": throughput,
        "saturated": saturated,
        "interrupted": False,
        "completed": 10,
    }


@pytest.mark.parametrize("capacity", [3.0, 40.0, 95.0, 130.0])
def test_a_sweep_finds_the_capacity(capacity: float) -> None:
    """Of a server that does 100 requests a second when all come at once, and keeps to the limits up to `capacity`."""

    def measure(rate: float) -> dict[str, Any]:
        return figures(min(rate, 100.0), 1.0 if rate <= capacity else 0.4)

    levels = list(search(measure, 0.9))
    assert len(levels) <= 13
    found = best(levels)
    assert found is not None
    assert capacity * 0.95 <= found.throughput <= capacity


@pytest.mark.parametrize("disturbed", [2, 3, 5])
def test_a_level_that_was_disturbed_costs_no_capacity(disturbed: int) -> None:
    """Other work on the machine lets one level of a server for 95 requests a second miss its limits."""
    tried: list[float] = []

    def measure(rate: float) -> dict[str, Any]:
        tried.append(rate)
        return figures(min(rate, 100.0), 1.0 if rate <= 95 and len(tried) != disturbed else 0.4)

    found = best(list(search(measure, 0.9)))
    assert found is not None
    assert 95 * 0.95 <= found.throughput <= 95
    assert len(tried) <= 16


def test_a_rate_that_the_server_does_not_keep_up_with_is_not_met() -> None:
    """All requests are within the limits, because the run ends before the queue is long."""
    levels = list(search(lambda rate: figures(min(rate, 50.0), 1.0, saturated=50.0 < rate < math.inf), 0.9))
    found = best(levels)
    assert found is not None
    assert 47.5 <= found.throughput <= 50


def test_a_sweep_may_find_nothing() -> None:
    none = list(search(lambda _: figures(9.0, 0.1), 0.9))
    assert best(none) is None
    assert len(none) <= 12


def test_a_sweep_of_requests_under_way_ends_where_the_throughput_does() -> None:
    """Of a server that works on 12 at a time, each a tenth of a second."""
    tried: list[int] = []

    def measure(concurrency: int) -> dict[str, Any]:
        tried.append(concurrency)
        return figures(10.0 * min(concurrency, 12), 1.0 if concurrency <= 8 else 0.5)

    levels = list(sweep_concurrency(measure, (), 0.95))
    assert tried == [1, 2, 4, 8, 16, 32]
    place = saturation(levels)
    assert place is not None
    assert (place.concurrency, place.throughput) == (16, 120.0)
    within = most_within(levels)
    assert within is not None
    assert (within.concurrency, within.throughput) == (8, 80.0)
    tried.clear()
    assert saturation(list(sweep_concurrency(measure, (4, 8), 0.95))) is None  # it still grows
    assert tried == [4, 8]


def test_a_server_falls_behind_only_when_it_completes_fewer_than_come() -> None:
    due = [index / 20 for index in range(400)]
    requests = [(100 + at, [100 + at + 0.1 * (1 + index % 3)], 1, None) for index, at in enumerate(due)]
    summary = summarize(outcome(*requests, due=due))
    assert summary["steady_arrival_rate"] == pytest.approx(20)
    assert summary["steady_request_throughput"] == pytest.approx(20, rel=0.01)
    assert summary["saturated"] is False
    slow = [(100 + at, [100 + at * 1.15 + 0.1], 1, None) for at in due]
    assert summarize(outcome(*slow, due=due))["saturated"] is True
    assert summarize(outcome(*slow, due=[0.0] * 400))["saturated"] is False  # all at once asks for no rate


def slow_server(
    _url: str, _template: RequestTemplate, workload: RandomWorkload, arrival: Arrival, **_: object
) -> Outcome:
    """It does 20 requests a second and is within the limits up to 14."""
    late = 0.1 if arrival.request_rate <= 14 else 0.5
    starts = [100 + index / min(arrival.request_rate, 20.0) for index in range(workload.num_prompts)]
    due = [index / arrival.request_rate for index in range(workload.num_prompts)]
    return outcome(*((start, [start + late, start + late + 0.02], 2, None) for start in starts), due=due)


@pytest.mark.parametrize("seconds", [8.0, 10.0, 12.0, 13.5, 20.0])
def test_requests_that_end_in_waves_are_counted_as_the_server_works(seconds: float) -> None:
    """64 under way that begin and end together every 3.4 s: whenever the run ends, it is 64 / 3.4 requests a second."""
    waves = [100 + 3.4 * number for number in range(math.ceil(seconds / 3.4))]
    requests = [(start + place / 1000, [start + 1.0, start + 3.4], 2, None) for start in waves for place in range(64)]
    summary = summarize(outcome(*requests))
    assert summary["steady_request_throughput"] == pytest.approx(64 / 3.4, rel=0.02)


def test_a_sweep_is_reported_by_the_rate_that_was_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "drive", slow_server)
    output, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    options = ["--model", "<m>", "--num-prompts", "40", "--goodput", "ttft:200", "--sweep", "0.9"]
    assert main(["bench", *options, "--output", str(output), "--html", str(page)]) == 0
    summary = json.loads(output.read_text())
    assert 13.3 <= summary["sweep_best_throughput"] <= 14
    assert summary["request_rate"] == summary["sweep_best_request_rate"]
    assert summary["median_ttft_ms"] == pytest.approx(100)
    assert [level["met"] for level in summary["sweep"]][:2] == [False, False]
    printed = capsys.readouterr().out
    assert f"Reached: {summary['sweep_best_throughput']:.3g} requests/s within the limits." in printed
    text = check_page(page, num_plots=13)
    assert "limit 200 ms" in text
    assert "Load test of &lt;m&gt;" in text
    assert f'class="headline">{summary["sweep_best_throughput"]:.3g} requests/s within the limits<' in text


def test_a_sweep_of_requests_under_way_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int, int]] = []

    def drive(
        _url: str, _template: RequestTemplate, workload: RandomWorkload, arrival: Arrival, **_: object
    ) -> Outcome:
        seen.append((arrival.max_concurrency or 0, workload.first, workload.num_prompts))
        rate = 10.0 * min(arrival.max_concurrency or 4, 4)
        return outcome(
            *((100 + index / rate, [100.1 + index / rate], 1, None) for index in range(workload.num_prompts))
        )

    monkeypatch.setattr(bench, "drive", drive)
    output, page = tmp_path / "sweep.json", tmp_path / "sweep.html"
    options = ["--model", "m", "--num-prompts", "20", "--num-warmups", "5", "--sweep-concurrency"]
    assert main(["bench", *options, "--output", str(output), "--html", str(page)]) == 0
    # Each level has prompts of its own, and at least four for each request under way.
    assert seen == [(0, 0, 5), (1, 5, 20), (2, 25, 20), (4, 45, 20), (8, 65, 32)]
    summary = json.loads(output.read_text())
    assert (summary["saturation_concurrency"], summary["max_concurrency"]) == (4, 4)
    assert "Saturated at 4 requests under way" in capsys.readouterr().out
    assert "saturated at 4" in check_page(page, num_plots=9)
