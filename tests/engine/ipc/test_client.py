"""EngineClient and EngineSupervisor against a real engine process with a stub core."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.engine.contract.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)
from tessera.engine.contract.messages import (
    AccountRef,
    Heartbeat,
    LoadProgress,
    RequestOutput,
    SchedulerStats,
    StepOutputs,
    TokenLogprobs,
    refused,
)
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.client import LEAST_WAKES, EngineClient
from tessera.engine.ipc.heartbeat import HeartbeatReceiver
from tessera.engine.ipc.request_stream import Inbox, RequestStream, _merge, error_of
from tessera.engine.ipc.supervisor import EngineStartError, EngineState, make_run_dir
from tests.support.cases.token_ids import token_ids
from tests.support.fakes import stub_engine
from tests.support.processes.stub_engines import DEADLINE, count, engine, run, tokens_of, until, until_well

HEALTH_DEADLINE = 5.0  # what users are promised
ENDLESS = SamplingParams(max_tokens=10**9)


async def until_idle(client: EngineClient) -> None:
    def idle() -> bool:
        last = client._heartbeats.last
        return last is not None and not last.has_work

    client._heartbeats.last = None
    await until(idle, "an engine without work")


def test_streams_of_concurrent_requests() -> None:
    async def scenario() -> None:
        async with engine() as (supervisor, client):
            assert client.health() == (False, "the engine is starting")
            with pytest.raises(EngineUnavailableError, match="starting"):
                client.submit(token_ids([1]), ENDLESS)
            await until_well(client)
            await asyncio.gather(*(count(client, 100 * i, 20 + i) for i in range(20)))
            assert client.info == supervisor.info
            assert supervisor.state is EngineState.READY
            assert (await client.metrics()).startswith(b"stub_steps_total ")

    run(scenario())


def test_a_heartbeat_of_the_loading_does_not_outlast_it() -> None:
    """The last heartbeat may be half a second older than the news that the engine is loaded."""

    async def scenario() -> None:
        async with engine() as (_, client):
            await client.wait_first_ready()
            assert client._epoch is not None
            loading = Heartbeat(client._epoch, num_steps=0, has_work=False, ready=False, stats=None)
            client._heartbeats.last = loading
            assert client.ready
            client._heartbeats.last = msgspec.structs.replace(loading, draining=True)
            assert not client.ready

    run(scenario())


def test_the_history_has_what_heartbeats_told_once_each() -> None:
    """A step longer than the time between heartbeats lets them repeat themselves, which is no news."""

    async def scenario() -> None:
        async with engine() as (_, client):
            await client.wait_first_ready()
            assert client._epoch is not None
            client.history.clear()
            beat = Heartbeat(client._epoch, num_steps=0, has_work=True, ready=True, stats=None)
            for time, num_running in ((1.0, 1), (1.0, 1), (1.5, 2)):
                stats = SchedulerStats(num_running, 0, 1, 0, 0)
                client._on_heartbeat(msgspec.structs.replace(beat, stats=stats, stats_time=time))
            client._on_heartbeat(beat)
            assert [(time, stats.num_running) for time, stats in client.history] == [(1.0, 1), (1.5, 2)]
            client._engine_lost()
            assert not client.history, "what was counted ended with its engine"

    run(scenario())


def test_two_clients_at_once() -> None:
    async def scenario() -> None:
        async with engine() as (supervisor, first):
            second = EngineClient(supervisor._run_dir)
            await second.start()
            await asyncio.gather(until_well(first), until_well(second))
            await asyncio.gather(*(count(client, 10, 30) for client in (first, second) for _ in range(5)))
            await second.close()
            await count(first, 10, 30)

    run(scenario())


def test_outputs_for_a_slow_consumer_are_merged_in_order() -> None:
    async def scenario() -> None:
        async with engine() as (_, client):
            await until_well(client)
            stream = client.submit(token_ids([0]), SamplingParams(max_tokens=50))
            await until(lambda: not client._inboxes, "the end of the request")
            outputs = [output async for output in stream]
            assert len(outputs) == 1
            assert outputs[0].token_ids == list(range(1, 51))
            assert outputs[0].finish_reason == "length"

    run(scenario())


@pytest.mark.parametrize("how", ["abort", "context", "cancel", "drop"])
def test_an_abandoned_request_is_aborted(how: str) -> None:
    async def scenario() -> None:
        async with engine() as (_, client):
            await until_well(client)
            stream = client.submit(token_ids([1]), ENDLESS)
            await anext(stream)
            if how == "abort":
                await stream.abort()
                await stream.abort()
                assert [output async for output in stream] == []
            elif how == "context":
                async with stream:
                    pass
            elif how == "cancel":
                consumer = asyncio.create_task(tokens_of(stream))
                await asyncio.sleep(0)
                consumer.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await consumer
            elif how == "drop":
                del stream
                gc.collect()
            await until_idle(client)
            assert not client._inboxes
            await count(client, 5, 5)

    run(scenario())


@pytest.mark.parametrize(
    ("first_token", "expected"),
    [
        (stub_engine.IS_ONE_TOO_MANY, QueueFullError),
        (stub_engine.IS_TOO_LONG, ContextLengthError),
        (stub_engine.FAILS_ALONE, EngineError),
    ],
)
def test_a_failed_request_raises_and_hurts_no_other(first_token: int, expected: type[RequestError]) -> None:
    async def scenario() -> None:
        async with engine() as (_, client):
            await until_well(client)
            neighbour = asyncio.create_task(count(client, 10, 50))
            with pytest.raises(expected) as caught:
                await tokens_of(client.submit(token_ids([first_token]), ENDLESS))
            assert type(caught.value) is expected
            if isinstance(caught.value, QueueFullError):
                assert caught.value.retry_after == 7
            await neighbour

    run(scenario())


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError("full", retry_after=3),
        ContextLengthError("long", param="messages"),
        InvalidRequestError("wrong", param="seed", code="bad"),
        EngineUnavailableError("away"),
        EngineError("broken"),
    ],
)
def test_errors_cross_the_process_boundary_whole(error: RequestError) -> None:
    copy = error_of(refused("id", error))
    assert type(copy) is type(error)
    assert {**vars(copy)}.items() >= vars(error).items()
    assert (copy.status, copy.type, copy.code) == (error.status, error.type, error.code)


def test_a_killed_engine_fails_its_requests_at_once_and_is_restarted() -> None:
    async def scenario() -> None:
        async with engine() as (supervisor, client):
            await until_well(client)
            streams = [client.submit(token_ids([1]), ENDLESS) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            first_pid = supervisor.pid
            assert first_pid is not None
            os.kill(first_pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineError) as caught:
                    await asyncio.wait_for(tokens_of(stream), HEALTH_DEADLINE)
                assert (caught.value.status, caught.value.code) == (500, "engine_died")
            assert client.health() == (False, "the engine process ended and is being restarted")
            with pytest.raises(EngineUnavailableError):
                client.submit(token_ids([1]), ENDLESS)
            await until(lambda: supervisor.state is EngineState.RESTARTING, "the supervisor's notice", HEALTH_DEADLINE)
            assert "signal 9" in supervisor.reason
            await until_well(client)
            assert supervisor.pid != first_pid
            await count(client, 10, 10)

    run(scenario())


def test_an_engine_that_was_not_there_hears_what_is_to_be_forgotten() -> None:
    """What it has on disk outlasts it."""

    async def scenario() -> None:
        async with engine() as (supervisor, client):
            client.reset_prefix_cache([1, 2])
            await until_well(client)
            assert b"# resets [[1, 2]]\n" in await client.metrics()
            client.reset_prefix_cache()
            assert b"# resets [[1, 2], None]\n" in await client.metrics()
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: not client.health()[0], "the engine's end")
            client.reset_prefix_cache([3])
            client.reset_prefix_cache([3])
            await until_well(client)
            assert b"# resets [[3]]\n" in await client.metrics()

    run(scenario())


def open_files() -> list[str]:
    """What this process's descriptors are."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> list[HeartbeatReceiver]:
    """All that are made; one that has heard something is connected."""
    made: list[HeartbeatReceiver] = []

    class RecordedReceiver(HeartbeatReceiver):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    for module in ("client", "supervisor"):
        monkeypatch.setattr(f"tessera.engine.ipc.{module}.HeartbeatReceiver", RecordedReceiver)
    return made


def test_fault_descriptors_an_engine_that_dies_without_any_comes_back(
    receivers: list[HeartbeatReceiver], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with engine() as (supervisor, client):
            await until_well(client)
            assert len(receivers) == 2
            await until(lambda: all(one.last is not None for one in receivers), "all connections")
            before = open_files()
            first_pid = supervisor.pid
            assert first_pid is not None
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                os.kill(first_pid, signal.SIGKILL)
                await until(lambda: "could not be run" in supervisor.reason, "the supervisor's failure")
                await until(lambda: "cannot be connected to" in caplog.text, "the client's failure")
                assert client.health() == (False, "the engine process ended and is being restarted")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await until_well(client)
            await count(client, 10, 10)
            await until(lambda: len(open_files()) <= len(before) + 1, "descriptors given back")

    run(scenario())


def test_a_fault_in_a_step_is_survived() -> None:
    async def scenario() -> None:
        async with engine() as (_, client):
            for _ in range(2):
                await until_well(client)
                with pytest.raises(EngineError):
                    await tokens_of(client.submit(token_ids([stub_engine.FAILS]), ENDLESS))
            await until_well(client)
            await count(client, 10, 10)

    run(scenario())


def test_fault_false_health_a_stopped_engine_is_not_healthy_and_recovers() -> None:
    async def scenario() -> None:
        async with engine() as (supervisor, client):
            await until_well(client)
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGSTOP)
            await until(lambda: not client.health()[0], "ill health", HEALTH_DEADLINE)
            assert "no sign of life" in client.health()[1]
            with pytest.raises(EngineUnavailableError):
                client.submit(token_ids([1]), ENDLESS)
            os.kill(supervisor.pid, signal.SIGCONT)
            await until_well(client)
            await count(client, 10, 10)

    run(scenario())


def test_a_silent_engine_is_replaced() -> None:
    async def scenario() -> None:
        async with engine(silence_timeout=2.0) as (supervisor, client):
            await until_well(client)
            stream = client.submit(token_ids([1]), ENDLESS)
            await anext(stream)
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGSTOP)
            with pytest.raises(EngineError):
                await tokens_of(stream)
            await until_well(client)
            await count(client, 10, 10)

    run(scenario())


def test_fault_false_health_a_hanging_step_is_noticed_and_the_engine_replaced() -> None:
    async def scenario() -> None:
        async with engine(step_timeout=1.0) as (_, client):
            await until_well(client)
            stream = client.submit(token_ids([stub_engine.HANGS]), ENDLESS)
            with pytest.raises(EngineError):
                await tokens_of(stream)
            await until_well(client)
            await count(client, 10, 10)

    run(scenario())


def test_a_step_that_stands_still_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.engine.ipc.client.STALL_LIMITS", {"cpu": 0.5, "cuda": 0.5})

    async def scenario() -> None:
        async with engine() as (supervisor, client):
            await until_well(client)
            stream = client.submit(token_ids([stub_engine.HANGS]), ENDLESS)
            await until(lambda: not client.health()[0], "ill health", HEALTH_DEADLINE)
            assert "one step" in client.health()[1]
            await stream.abort()
            await supervisor.stop(timeout=0)

    run(scenario())


def test_progress_of_the_start_is_passed_on() -> None:
    seen: list[LoadProgress] = []

    async def scenario() -> None:
        async with engine(on_progress=seen.append) as (supervisor, _):
            info = await supervisor.wait_started()
            assert info.architecture == "StubForCausalLM"

    run(scenario())
    assert seen == [LoadProgress("weights", done, 3) for done in (1, 2, 3)]


def test_a_user_error_is_not_retried() -> None:
    async def scenario() -> None:
        async with engine("unsupported") as (supervisor, client):
            with pytest.raises(
                ConfigError, match=r"^the architecture Unheard-of is not supported; supported are: Llama$"
            ):
                await supervisor.wait_started()
            assert supervisor.state is EngineState.FAILED
            assert not client.health()[0]

    run(scenario())


def test_a_fault_at_the_start_is_retried_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.engine.ipc.supervisor.FIRST_BACK_OFF", 0.01)

    async def scenario() -> None:
        async with engine("faulty") as (supervisor, _):
            with pytest.raises(EngineStartError, match="the stub device is broken"):
                await supervisor.wait_started()
            assert supervisor.state is EngineState.FAILED
        async with engine("crashing") as (supervisor, _):
            with pytest.raises(EngineStartError, match="exit code 9"):
                await supervisor.wait_started()

    run(scenario())


def test_stop_lets_running_requests_finish() -> None:
    async def scenario() -> None:
        async with engine() as (supervisor, client):
            await until_well(client)
            stream = client.submit(token_ids([0]), SamplingParams(max_tokens=200))
            await anext(stream)
            stop = asyncio.create_task(supervisor.stop())
            tokens = await tokens_of(stream)
            assert tokens[-1] == 200
            await stop
            assert supervisor.state is EngineState.STOPPED

    run(scenario())


def test_stop_ends_an_engine_that_does_not_listen() -> None:
    async def scenario() -> None:
        async with engine() as (supervisor, client):
            await until_well(client)
            pid = supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await supervisor.stop(timeout=0.1)
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(scenario())


def test_the_working_folder_cannot_replace_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("engine", "tests"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        async with engine() as (supervisor, _):
            assert (await supervisor.wait_started()).architecture == "StubForCausalLM"

    run(scenario())


def test_run_dir_is_private_and_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_dir = make_run_dir()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    run_dir.rmdir()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        make_run_dir()
    assert list(long.iterdir()) == []


def test_fault_full_disk_no_room_for_the_run_dir_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="no room for temporary files"):
        make_run_dir()


def test_merged_logprobs_stay_with_their_tokens() -> None:
    """And the first output keeps what only that has."""
    entries = [TokenLogprobs(token, -1.0, 1, [], []) for token in range(4)]
    first: dict[str, Any] = {"num_cached_tokens": 16, "queue_time": 0.5, "prompt_logprobs": [entries[3]]}
    earlier = RequestOutput("id", [0], [entries[0]], **first)
    _merge(earlier, RequestOutput("id", [1, 2], entries[1:3], num_cached_tokens=16))
    _merge(earlier, RequestOutput("id", [7], entries[3:], "stop", 7, num_cached_tokens=16))
    assert earlier == RequestOutput("id", [0, 1, 2, 7], entries, "stop", 7, **first)


def test_a_request_is_accepted_before_its_first_token_or_refused() -> None:
    async def scenario() -> None:
        async with engine() as (_, client):
            await until_well(client)
            stream = client.submit(token_ids([1]), SamplingParams(max_tokens=3))
            await asyncio.wait_for(stream.wait_accepted(), DEADLINE)
            assert await tokens_of(stream) == [2, 3, 4]
            with pytest.raises(QueueFullError):
                await client.submit(token_ids([stub_engine.IS_ONE_TOO_MANY]), ENDLESS).wait_accepted()

    asyncio.run(scenario())


def test_fault_liveness_a_wait_that_begins_as_another_is_cancelled_is_woken() -> None:
    """As where the head of a stream was waited for in vain, and its first token is waited for next."""

    async def scenario() -> None:
        inbox = Inbox()
        for_the_head = asyncio.ensure_future(inbox.wait())
        await asyncio.sleep(0)
        for_the_head.cancel()
        asyncio.get_running_loop().call_later(0.01, inbox.wake)
        await inbox.wait()  # in this task, so before the other has ended

    run(scenario())


def test_fault_fairness_a_step_with_hundreds_of_one_accounts_outputs_wakes_anothers_consumer_soon(
    tmp_path: Path,
) -> None:
    """And wakes the rest in the passes of the loop that follow, each with all that has come meanwhile."""
    heavy, light, num_streams = AccountRef(1), AccountRef(2), 200
    order: list[str] = []

    async def scenario() -> None:
        client = EngineClient(tmp_path)
        await client.start()
        inboxes = {f"r{number}": Inbox(heavy.id) for number in range(num_streams)}
        inboxes["light"] = Inbox(light.id)
        client._inboxes.update(inboxes)

        async def consume(name: str) -> int:
            num_tokens = 0
            async for output in RequestStream(client, name, inboxes[name]):
                order.append(name)
                num_tokens += len(output.token_ids)
            return num_tokens

        tasks = [asyncio.ensure_future(consume(name)) for name in inboxes]
        await asyncio.sleep(0)
        for reason in (None, "length"):
            client._dispatch(StepOutputs("e", [RequestOutput(name, [1], finish_reason=reason) for name in inboxes]))
        assert await asyncio.gather(*tasks) == [2] * len(inboxes)
        await client.close()

    run(scenario())
    assert len(order) == num_streams + 1, "two outputs as one"
    assert order.index("light") <= 2 * LEAST_WAKES
