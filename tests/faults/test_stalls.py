"""Stalls: work for one request on the event loop or the engine's thread, for which everybody waits."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable

import pytest

from tessera.app.http.access_log import name_task
from tessera.app.http.counts import HttpCounts
from tessera.app.server.loop_lag import LoopLag
from tessera.engine.contract import stalls as stalls_module
from tessera.engine.contract.histogram import SECONDS_OF_DELAY
from tessera.engine.contract.stalls import NO_TIMES, Sight, Stall, StallWatch, ThreadTimes, stall_of
from tessera.engine.ipc.turns import TimedRunner, Turns
from tests.support.fakes.fake_runner import FakeRunner, Harness

LIMIT = 0.02
LONG = 0.5
PATIENCE = 30.0


def hold_up(seconds: float) -> None:
    """Work that no other thread of this process has to wait for, as long as it takes by the clock."""
    threading.Event().wait(seconds)


def compute(seconds: float) -> None:
    """For so long, by this thread's own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def endpoint(work: Callable[[], None]) -> None:
    name_task("POST", "/v1/slow")
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
        await endpoint(work)
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


def compute_in_one_call() -> None:
    """For a few tenths of a second, in which no other thread can run."""
    sum(itertools.repeat(1, 2 * 10**7))


def test_fault_stalls_a_call_that_holds_the_interpreters_lock_all_the_time_is_noticed() -> None:
    """The watch waits for the lock as well, and found everything well afterwards."""
    stalls, lags = lags_of(compute_in_one_call)
    assert max(lags) > LIMIT
    named = [other for stall in stalls for other in stall.others]
    assert any(other.startswith("MainThread computed ") for other in named), stalls


def test_fault_stalls_another_thread_that_holds_the_interpreters_lock_is_named() -> None:
    ended = threading.Event()

    def hold_the_lock() -> None:
        compute_in_one_call()
        ended.wait(PATIENCE)

    thread = threading.Thread(target=hold_the_lock, name="hog")
    stalls, _ = lags_of(thread.start)
    ended.set()
    thread.join()
    named = [other for stall in stalls for other in stall.others if other.startswith("hog computed ")]
    assert any("hold_the_lock" in other for other in named), stalls
    assert any(named[0] in str(stall) for stall in stalls)


@pytest.mark.parametrize(
    ("computed", "waited", "stack", "process", "ours"),
    [
        (0.0, 0.0, ("main.py:1 run",), 0.0, 0.1),  # it slept
        (0.0, 0.03, ("main.py:1 run",), 0.01, 0.07),  # the machine ran others
        (0.04, 0.09, ("main.py:1 run",), 0.04, 0.04),  # so it did beside a thread that does not matter
        (0.0, 0.0, (), 0.02, 0.02),  # no thread was seen, so one held the lock, and hardly ran
    ],
)
def test_fault_stalls_a_lock_whose_holder_is_not_run_is_the_machines(
    monkeypatch: pytest.MonkeyPatch,
    computed: float,
    waited: float,
    stack: tuple[str, ...],
    process: float,
    ours: float,
) -> None:
    holder = -1
    monkeypatch.setattr(stalls_module, "_times_of_threads", lambda: {holder: ThreadTimes(5.0, 1.0 + waited)})
    sight = Sight(None, stack, {holder: ("body.py:2 parse",)}, {holder: ThreadTimes(4.9, 1.0)})
    stall = stall_of("the event loop", 0, 0.1, ThreadTimes(computed, 0.0), process, sight)
    assert abs(stall.own_seconds - ours) < 1e-6
    assert stall.others == ("a thread computed 100 ms: body.py:2 parse",)


def test_fault_stalls_a_process_that_was_stopped_held_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on in the middle of a turn, which the watch may see."""
    monkeypatch.setattr(stalls_module, "_times_of_threads", dict)
    stack = ("outgoing.py:31 send",)
    stopped = Sight(None, stack, {}, {}, is_late=True)
    assert stall_of("the engine's thread", 0, 2.9, NO_TIMES, 0.01, stopped).own_seconds == 0.01
    assert stall_of("the engine's thread", 0, 2.9, ThreadTimes(2.8, 0.0), 2.8, stopped).own_seconds == 2.8
    assert stall_of("the engine's thread", 0, 2.9, NO_TIMES, 0.01, Sight(None, stack, {}, {})).own_seconds > 2.5


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
    turns.work_on("r1")
    hold_up(LONG)
    turns.work_on(None)
    turns.end()
    turns.close()
    assert stalls[-1].request == "r1"
    assert "hold_up" in str(stalls[-1])
    assert turns.gap.total >= LONG
    assert b'tessera:engine_step_gap_seconds_count{model_name="tiny"} 2.0' in turns.render()


def test_fault_stalls_what_the_engine_computes_in_pauses_is_none_of_its_own() -> None:
    """On the CPU the model's work is that of the same thread, and was taken for the turn's own."""
    stalls: list[Stall] = []
    watch = StallWatch("the engine's thread", LIMIT, stalls.append)
    watch.close()
    watch.begin()
    watch.pause()
    compute(LONG)
    watch.resume()
    hold_up(2 * LIMIT)
    watch.end()
    (stall,) = stalls
    assert stall.seconds >= 2 * LIMIT
    assert stall.own_seconds < LIMIT


def test_fault_stalls_time_that_no_thread_computed_is_the_machines() -> None:
    """The thread that held the interpreter's lock was not run: other programs were."""
    stalls: list[Stall] = []
    watch = StallWatch("the engine's thread", LIMIT, stalls.append)
    watch.close()
    watch.begin()
    hold_up(LONG)
    watch.end()
    watch.begin()
    compute(2 * LIMIT)
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
