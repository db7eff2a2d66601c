"""Stalls: work for one request on the event loop or the engine's thread, for which everybody waits."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from tessera.app.http.counts import HttpCounts
from tessera.app.server.loop_lag import LoopLag
from tessera.engine.contract.histogram import SECONDS_OF_DELAY
from tessera.engine.contract.stalls import Stall, StallWatch
from tessera.engine.ipc.turns import TimedRunner, Turns
from tests.support.fake_runner import FakeRunner, Harness

LIMIT = 0.02
LONG = 0.5
PATIENCE = 30.0


def hold_up(seconds: float) -> None:
    """Work that no other thread of this process has to wait for, as long as it takes by the clock."""
    threading.Event().wait(seconds)


async def endpoint(scope: dict[str, Any], work: Callable[[], None]) -> None:
    work()


def lags_of(work: Callable[[], None]) -> tuple[list[Stall], list[float]]:
    """The stalls that are reported, and the lags, while an endpoint does `work`."""
    stalls: queue.Queue[Stall] = queue.Queue()
    lags: list[float] = []

    async def scenario() -> None:
        lag = LoopLag(lags.append, LIMIT, stalls.put)
        lag.start()
        deadline = time.monotonic() + PATIENCE
        while not lags and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        await endpoint({"path": "/v1/slow", "method": "POST"}, work)
        num_before = len(lags)
        while len(lags) < num_before + 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        lag.stop()

    asyncio.run(scenario())
    return [stalls.get() for _ in range(stalls.qsize())], lags


def test_fault_stalls_a_request_that_holds_up_the_event_loop_is_named_with_its_code() -> None:
    stalls, lags = lags_of(lambda: hold_up(LONG))
    (stall,) = [one for one in stalls if one.request == "POST /v1/slow"]
    assert max(lags) >= stall.seconds >= LONG / 2  # on a busy machine the watch itself comes late
    assert stall.own_seconds >= LONG / 4
    assert any("hold_up" in line for line in stall.stack)
    assert "POST /v1/slow" in str(stall)


def test_fault_stalls_the_events_loop_lag_is_a_histogram_over_all_app_processes() -> None:
    counts = HttpCounts(())
    for seconds in (0.00005, 0.03, 100.0):
        counts.observe_lag(seconds)
    (family,) = [one for one in counts.collect("tessera") if one.name == "tessera:event_loop_lag_seconds"]
    found = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert found["0.0001"] == 1
    assert found["0.02"] == 1
    assert found["0.035"] == found[repr(float(SECONDS_OF_DELAY[-1]))] == 2
    assert found["+Inf"] == found["tessera:event_loop_lag_seconds_count"] == 3
    assert abs(found["tessera:event_loop_lag_seconds_sum"] - 100.03005) < 1e-6


def test_fault_stalls_a_turn_of_the_engine_counts_without_its_computation() -> None:
    stalls: list[Stall] = []
    turns = Turns("tiny", LIMIT)
    turns._watch.close()
    turns._watch = StallWatch("the engine's thread", LIMIT, stalls.append)
    turns.begin()
    turns.begin_computation()
    hold_up(LONG)
    turns.end_computation()
    turns.end()
    assert [stall for stall in stalls if stall.own_seconds > LONG / 2] == []
    assert turns.gap.total < LONG

    turns.begin()
    request = Request("r1")
    receive(request)
    turns.end()
    turns.close()
    assert stalls[-1].request == "r1"
    assert "hold_up" in str(stalls[-1])
    assert turns.gap.total >= LONG
    assert b'tessera:engine_step_gap_seconds_count{model_name="tiny"} 2.0' in turns.render()


class Request:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


def receive(message: Request) -> None:
    hold_up(LONG)


def test_fault_stalls_time_that_no_thread_computed_is_the_machines() -> None:
    """The thread that held the interpreter's lock was not run: other programs were."""
    stalls: list[Stall] = []
    watch = StallWatch("the engine's thread", LIMIT, stalls.append)
    watch.close()
    watch.begin()
    hold_up(LONG)
    watch.end()
    watch.begin()
    end = time.thread_time() + 2 * LIMIT
    while time.thread_time() < end:
        pass
    watch.end()
    idle, busy = stalls
    assert idle.seconds >= LONG
    assert idle.own_seconds < LONG / 4
    assert busy.own_seconds >= LIMIT


def test_fault_stalls_the_timed_runner_takes_nothing_from_a_step() -> None:
    turns = Turns()
    harness = Harness(asynchronous=True)
    plain = Harness(asynchronous=True)
    harness.core._runner = TimedRunner(harness.runner, turns)
    assert isinstance(plain.core._runner, FakeRunner)
    for each in (harness, plain):
        each.add("a", [1, 2, 3], 8)
        each.add("b", [1, 2, 3, 4, 5], 5)
    turns.begin()
    harness.run()
    turns.end()
    plain.run()
    assert harness.token_ids == plain.token_ids
