"""The times that a load test's client process records, on a clock that stands still while it works.

Against a server whose delays are known every figure is then known to the last digit, on any machine.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.loadtest.client import client_process, load_client, timed_completion
from tessera.loadtest.client.client_process import Plan, Result, Start
from tessera.loadtest.client.load_client import Target
from tessera.loadtest.client.records import Records
from tessera.loadtest.run.load_run import Outcome
from tessera.loadtest.run.summary import summarize
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.jobs import write_jobs
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tessera.loadtest.workload.request_template import RequestTemplate
from tests.support.fakes.load_stub import Manner, StubServer
from tests.support.fakes.virtual_time import VirtualTimeLoop

START = 1000.5  # on the loop's clock, which begins at 1000

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """(server, number of requests, their output tokens, arrival) -> the summary of one client process's records."""

    def run(
        server: StubServer,
        number: int,
        output_len: int,
        arrival: Arrival,
        *,
        stream: bool = True,
        timeout: float = 60.0,
    ) -> dict[str, Any]:
        workload = RandomWorkload(number, 50, output_len, 500)
        offsets = write_jobs(tmp_path / "jobs", workload.jobs(RequestTemplate("stub", stream=stream)))
        target = Target("http://stub/v1/completions", {}, stream, timeout)
        arrivals = arrival.times(number, seed=0).tolist()
        ours, theirs = multiprocessing.Pipe()
        for message in (Plan(target, str(tmp_path / "jobs"), offsets, arrivals, arrival.max_concurrency), Start(START)):
            ours.send_bytes(msgspec.msgpack.encode(message))
        loop = VirtualTimeLoop(server.protocol)
        for module in (timed_completion, load_client, time):  # the stub's truth is on this clock as well
            monkeypatch.setattr(module, "perf_counter", loop.time)

        def on_this_loop(work: Coroutine[Any, Any, Result | None]) -> Result | None:
            return loop.run_until_complete(work)

        monkeypatch.setattr(client_process, "_run", on_this_loop)
        monkeypatch.setattr(gc, "freeze", lambda: None)  # a client process freezes what it has: here, pytest's
        try:
            client_process.main(theirs, multiprocessing.Value("q", 0))
        finally:
            monkeypatch.undo()
            loop.close()
        while not isinstance(message := _next(ours), Result):
            pass
        ours.close()
        return summarize(Outcome(Records.merge([message.records]), START, [message.cpu_share], False))

    return run


def _next(pipe: Any) -> Any:
    data = pipe.recv_bytes()
    return None if data == b"ready" else msgspec.msgpack.decode(data, type=client_process.Report)


def test_the_figures_of_streams(measure: Measure) -> None:
    """Twelve completions of 30 tokens, four at a time; each waits longer for its tokens than the one before."""
    server = StubServer(lambda index, _body: Manner(ttft=0.1 + 0.01 * index, tpot=0.01 + 0.001 * index))
    summary = measure(server, 12, 30, Arrival(max_concurrency=4))
    assert (summary["completed"], summary["failed"], summary["errors"]) == (12, 0, {})
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (12 * 50, 12 * 30)
    assert summary["max_concurrent_requests"] == server.most_running == 4
    expected = {
        "mean_ttft_ms": 155,
        "median_ttft_ms": 155,
        "p90_ttft_ms": 199,  # of 100, 110 ... 210
        "mean_tpot_ms": 15.5,
        "p90_tpot_ms": 19.9,
        "mean_itl_ms": 15.5,
        "p99_itl_ms": 21,
        "mean_e2el_ms": 155 + 29 * 15.5,
        "p90_e2el_ms": 199 + 29 * 19.9,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    # Requests 0, 4 and 8 follow one another without a pause, and so do 3, 7 and 11, which are the slowest.
    duration = sum(0.1 + 0.01 * index + 29 * (0.01 + 0.001 * index) for index in (3, 7, 11))
    assert summary["duration"] == pytest.approx(duration, rel=1e-9)
    assert summary["output_throughput"] == pytest.approx(12 * 30 / duration, rel=1e-9)
    assert summary["request_throughput"] == pytest.approx(12 / duration, rel=1e-9)


def test_completions_that_are_not_streamed_at_a_constant_rate(measure: Measure) -> None:
    server = StubServer(lambda _index, _body: Manner(ttft=0.1, tpot=0.02))
    summary = measure(server, 11, 3, Arrival(25, burstiness=float("inf")), stream=False)
    received = [exchange.received for exchange in server.exchanges]
    assert received == pytest.approx([START + index / 25 for index in range(11)], rel=1e-12)
    assert summary["median_e2el_ms"] == summary["p99_e2el_ms"] == pytest.approx(140, rel=1e-9)
    assert (summary["mean_ttft_ms"], summary["completed"], summary["total_output_tokens"]) == (0, 11, 33)
    assert summary["duration"] == pytest.approx(10 / 25 + 0.14, rel=1e-9)


def test_no_request_begins_before_it_is_due(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event loops may wake up a little early."""
    sleep = asyncio.sleep

    async def wake_up_early(delay: float) -> None:
        await sleep(delay - 0.001 if delay > 0.01 else delay)

    monkeypatch.setattr(asyncio, "sleep", wake_up_early)
    server = StubServer(lambda _index, _body: Manner(ttft=0.1, tpot=0.02))
    measure(server, 5, 3, Arrival(25, burstiness=float("inf")))
    received = [exchange.received for exchange in server.exchanges]
    assert received == pytest.approx([START + index / 25 for index in range(5)], rel=1e-12)


def test_a_request_that_takes_too_long_is_given_up(measure: Measure) -> None:
    """The second would take a minute; the first and the third, which comes when the second is given up, do not."""
    server = StubServer(lambda index, _body: Manner(ttft=60.0 if index == 1 else 0.5))
    summary = measure(server, 3, 5, Arrival(max_concurrency=1), timeout=0.75)
    assert (summary["completed"], summary["errors"]) == (2, {"timeout": 1})
    assert [exchange.received for exchange in server.exchanges] == pytest.approx([START, START + 0.5, START + 1.25])
    assert summary["median_e2el_ms"] == pytest.approx(500, rel=1e-9)
    assert summary["duration"] == pytest.approx(1.75, rel=1e-9)
