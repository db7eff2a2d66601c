"""Requests that are cancelled just as their body or their prompt is ready: the cancellation is never lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from tessera.app.http.body import read_json_object
from tessera.app.http.errors import ClientDisconnectedError, GenerationTimeoutError
from tessera.app.http.streaming import run_while_connected
from tessera.app.text.workers import TextWorkers
from tests.support.servers.http_fixtures import settings_for

MAX_TURNS = 8  # of the event loop, more than a result needs to reach its caller


async def cancel_each_turn(begin: Callable[[], tuple[Awaitable[Any], Callable[[], None]]]) -> int:
    """Cancels a task 0, 1, 2... turns after its work is done -> how many of the cancellations came before its end."""
    num_cancelled = 0
    for turns in range(MAX_TURNS):
        work, finish = begin()
        task = asyncio.ensure_future(work)
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
        finish()
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            break
        with pytest.raises(asyncio.CancelledError):
            await task
        num_cancelled += 1
    return num_cancelled


def test_a_cancelled_request_stays_cancelled_when_its_body_arrives(tmp_path: Any) -> None:
    settings = settings_for(tmp_path)

    async def scenario() -> int:
        def begin() -> tuple[Awaitable[Any], Callable[[], None]]:
            arrived = asyncio.get_running_loop().create_future()

            async def receive() -> Any:
                return await arrived

            scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
            message = {"type": "http.request", "body": b"{}", "more_body": False}
            return read_json_object(Request(scope, receive), settings), lambda: arrived.set_result(message)

        return await cancel_each_turn(begin)

    assert asyncio.run(scenario()) > 0


def test_a_cancelled_request_stays_cancelled_when_its_prompt_is_rendered() -> None:
    workers = TextWorkers(num_threads=1, max_jobs=4)

    async def scenario() -> int:
        def begin() -> tuple[Awaitable[Any], Callable[[], None]]:
            gate = threading.Event()

            def finish() -> None:
                gate.set()
                workers._pool.submit(int).result()  # so the job before it has ended

            return workers.run(gate.wait, timeout=60), finish

        return await cancel_each_turn(begin)

    assert asyncio.run(scenario()) > 1
    workers.close()


async def never() -> Any:
    await asyncio.get_running_loop().create_future()


def test_a_result_reaches_its_request_in_the_next_turn_of_the_event_loop() -> None:
    async def scenario() -> None:
        arrived: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def work() -> int:
            return await arrived

        task = asyncio.ensure_future(run_while_connected(never, work(), 60.0))
        await asyncio.sleep(0)
        arrived.set_result(3)
        await asyncio.sleep(0)
        assert task.done()
        assert task.result() == 3
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody looks any more whether the client has left"

    asyncio.run(scenario())


def test_work_ends_with_its_client_its_time_or_its_task() -> None:
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await never()
        finally:
            ended.append(name)

    async def leave() -> Any:
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        with pytest.raises(ClientDisconnectedError):
            await run_while_connected(leave, work("client"), 60.0)
        with pytest.raises(GenerationTimeoutError):
            await run_while_connected(never, work("time"), 0.001)
        await asyncio.sleep(0)  # nothing of it is left to cancel the task
        task = asyncio.ensure_future(run_while_connected(never, work("task"), 60.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert ended == ["client", "time", "task"]
