"""Metrics asked for all the time, without a key: rendering them took the engine's time from everybody."""

from __future__ import annotations

import asyncio
import queue
import threading

import pytest
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tessera.app.ops.metrics_page import BURST, INTERVAL, EngineText, MetricsPage
from tessera.app.ops.server_process import ServerProcess
from tessera.engine.contract.errors import EngineUnavailableError
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.metrics_thread import MetricsThread
from tests.support.fakes.stub_engine import SLOW_METRICS
from tests.support.fakes.virtual_time import VirtualTimeLoop
from tests.support.processes.stub_engines import count, engine, run, until_well

PATIENCE = 30.0
SCRAPES = 480  # at a time
SECONDS = 30


def test_fault_metrics_however_many_ask_a_text_is_rendered_once_a_second() -> None:
    num_rendered = 0

    async def render() -> bytes:
        nonlocal num_rendered
        num_rendered += 1
        number = num_rendered
        await asyncio.sleep(0.001)
        return b"%d" % number

    async def scenario() -> None:
        page = MetricsPage(render)
        begin = loop.time()
        while loop.time() < begin + SECONDS:
            asked = num_rendered
            texts = await asyncio.gather(*(page.text() for _ in range(SCRAPES)))
            assert int(texts[0]) > asked, "a text is not older than the question"
            await asyncio.sleep(0.01)
        assert SECONDS / INTERVAL <= num_rendered <= SECONDS / INTERVAL + BURST + 1

    loop = VirtualTimeLoop(asyncio.Protocol)
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_fault_metrics_the_event_loop_runs_while_the_system_lists_the_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop_ran = threading.Event()

    def slow_collect(_: ProcessCollector) -> list[Metric]:
        assert loop_ran.wait(PATIENCE), "the event loop stood still"
        return [GaugeMetricFamily("process_open_fds", "As many as there are.", 5000)]

    async def scenario() -> None:
        process = ServerProcess(0)
        monkeypatch.setattr(ProcessCollector, "collect", slow_collect)
        reading = asyncio.create_task(process.metrics())
        asyncio.get_running_loop().call_later(0, loop_ran.set)
        assert [family.samples[0].value for family in await reading] == [5000]

    asyncio.run(scenario())


def test_fault_metrics_an_engine_that_is_stopped_after_its_restart_is_not_waited_for() -> None:
    patience, is_down, goes_on = 0.2, True, asyncio.Event()

    async def ask() -> bytes:
        if is_down:
            raise EngineUnavailableError("it is down")
        await goes_on.wait()
        return b"text"

    async def scenario() -> None:
        nonlocal is_down
        text = EngineText(ask, patience)
        assert await text.latest() == b""
        is_down = False
        begin = loop.time()
        assert await asyncio.wait_for(text.latest(), PATIENCE) == b""
        assert loop.time() - begin <= 2 * patience
        goes_on.set()
        assert await text.latest() == b"text"

    loop = VirtualTimeLoop(asyncio.Protocol)
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_fault_metrics_clients_share_a_rendering_in_a_thread_of_its_own() -> None:
    begun, may_end, ready = queue.Queue[threading.Thread](), threading.Semaphore(0), threading.Semaphore(0)

    def render() -> bytes:
        begun.put(threading.current_thread())
        assert may_end.acquire(timeout=PATIENCE)
        return b"text"

    metrics = MetricsThread(render, ready.release)
    metrics.ask(b"a", 1)
    assert begun.get(timeout=PATIENCE) is not threading.current_thread()
    metrics.ask(b"b", 2)
    metrics.ask(b"c", 3)
    assert metrics.take() == []
    for _ in range(2):
        may_end.release()
        assert ready.acquire(timeout=PATIENCE)
    assert metrics.take() == [([(b"a", 1)], b"text"), ([(b"b", 2), (b"c", 3)], b"text")]
    metrics.close()


def test_fault_metrics_no_step_waits_for_their_rendering() -> None:
    async def ask(client: EngineClient) -> None:
        await client.metrics()

    async def scenario() -> None:
        async with engine(model=SLOW_METRICS) as (_, client):
            await until_well(client)
            asking = asyncio.create_task(ask(client))
            await asyncio.sleep(0)
            await count(client, 100, 20)
            assert not asking.done()
            asking.cancel()

    run(scenario())
