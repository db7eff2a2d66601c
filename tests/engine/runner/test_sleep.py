"""An engine that sleeps with its weights in host memory: the same tokens afterwards, no growth, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import EngineUnavailableError
from tessera.engine.contract.heap import resident_bytes
from tessera.engine.contract.messages import AddRequest, EngineReport, Sleep, Slept
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc import engine_process as process_module
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.engine_process import EngineProcess
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tessera.engine.ipc.request_stream import RequestStream
from tessera.engine.ipc.supervisor import EngineStartError, EngineState, EngineSupervisor, make_run_dir
from tests.support.cases.token_ids import token_ids
from tests.support.fakes import stub_engine
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build

CLIENT = b"client"
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


def start(folder: Path, **settings: Any) -> tuple[LoadedEngine, EngineCore]:
    defaults: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 8, "max_model_len": 64, "can_sleep": True}
    config = EngineConfig(model=str(folder), device="cpu", **{**defaults, **settings})
    engine = load_engine(config, lambda stage, done, total: None)
    assert isinstance(engine.core, EngineCore)
    return engine, engine.core


def run(core: EngineCore) -> dict[str, tuple[list[int], int]]:
    """Six conversations' tokens, and how many of each prompt were cached."""
    rng = np.random.default_rng(4)
    for number in range(6):
        prompt = array("i", rng.integers(3, VOCAB_SIZE, 30).tolist())
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        core.add_request(AddRequest(str(number), prompt, params, time.monotonic()), CLIENT)
    found: dict[str, tuple[list[int], int]] = {}
    while core.has_work:
        for output in core.step().get(CLIENT, []):
            assert output.error is None
            before, _ = found.get(output.request_id, ([], 0))
            found[output.request_id] = before + output.token_ids, output.num_cached_tokens
    return found


def tokens(found: dict[str, tuple[list[int], int]]) -> list[list[int]]:
    return [found[name][0] for name in sorted(found)]


def test_twenty_nights_change_no_token_and_leave_nothing_behind(folder: Path) -> None:
    engine, core = start(folder, num_kv_blocks=2_000)
    sleeper = engine.sleeper
    assert sleeper is not None
    assert engine.info.sleep_bytes == engine.info.weight_bytes
    expected = run(core)
    planes = core._runner._runner.kv_cache.planes  # type: ignore[attr-defined]
    sizes = []
    for cycle in range(20):
        for plane in planes:
            plane.numpy()[:] = 3.0  # pages that are in use
        awake = resident_bytes()
        sleeper.sleep()
        assert awake - resident_bytes() > 0.8 * engine.info.kv_cache_bytes, "the KV cache's memory is the system's"
        assert core.stats().num_cached_blocks == 0
        sleeper.wake_up()
        if cycle % 5 == 4:
            found = run(core)
            assert tokens(found) == tokens(expected)
            assert all(num_cached == 0 for _, num_cached in found.values()), "the KV cache was lost"
        assert core.block_manager.num_available_blocks == 2_000
        sizes.append(resident_bytes())
    assert sizes[-1] - sizes[4] < 8 * MIB, sizes


def test_kv_offload_keeps_its_blocks_overnight(folder: Path) -> None:
    engine, core = start(folder, num_kv_blocks=24, kv_offload_gib=0.01)
    assert engine.sleeper is not None
    expected = run(core)
    engine.sleeper.sleep()
    assert not core.block_manager.cached_blocks
    assert len(core.block_manager.free_blocks) == 24
    engine.sleeper.wake_up()
    found = run(core)
    assert tokens(found) == tokens(expected)
    assert sum(num_cached for _, num_cached in found.values()) > 0, "what was evicted before is in host memory"


def test_an_engine_that_was_not_started_for_it_cannot_sleep(folder: Path) -> None:
    engine, _ = start(folder, can_sleep=False)
    assert engine.sleeper is None
    assert engine.info.sleep_bytes is None


# -- the process ----------------------------------------------------------------------------------

LIMIT = 20.0  # seconds; only a failing test waits this long


@contextlib.asynccontextmanager
async def process(model: str = "stub") -> AsyncIterator[tuple[EngineSupervisor, EngineClient]]:
    """A real process with a stub for its model."""
    run_dir = make_run_dir()
    config = EngineConfig(model=model, can_sleep=True)
    supervisor = EngineSupervisor(config, run_dir, module="tests.support.fakes.stub_engine")
    client = EngineClient(run_dir)
    supervisor.start()
    await client.start()
    try:
        await client.wait_first_ready()
        yield supervisor, client
    finally:
        await client.close()
        await supervisor.stop()


async def count(client: EngineClient, num_tokens: int) -> int:
    """The tokens that a request of so many gets."""
    return await count_rest(client.submit(token_ids([100]), SamplingParams(max_tokens=num_tokens)))


async def count_rest(stream: RequestStream) -> int:
    return sum([len(output.token_ids) async for output in stream])


def test_requests_end_first_later_ones_are_refused_and_an_end_asleep_is_no_restart() -> None:
    async def scenario() -> None:
        async with process() as (supervisor, client):
            stream = client.submit(token_ids([100]), SamplingParams(max_tokens=300))
            num_first = len((await anext(stream)).token_ids)  # the engine has it before it is told to sleep
            running = asyncio.create_task(count_rest(stream))
            falling = asyncio.create_task(supervisor.sleep(LIMIT))
            refused = []
            while not falling.done():
                try:
                    await count(client, 1)
                except EngineUnavailableError as error:
                    refused.append(str(error))
            assert await falling
            assert running.done()
            assert num_first + await running == 300
            assert set(refused) == {"the model is asleep and takes no requests"}, "others are still being finished"
            with pytest.raises(EngineUnavailableError, match="asleep and takes no requests"):
                await count(client, 1)
            assert (await client.metrics()).startswith(b"stub_steps_total ")
            pid = supervisor.pid
            for _ in range(3):
                await supervisor.wake_up()
                assert await count(client, 5) == 5
                assert await supervisor.sleep(LIMIT)
            assert supervisor.pid == pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while supervisor.state is not EngineState.STOPPED:
                await asyncio.sleep(0.01)
            assert supervisor.pid is None, "it is not started again by itself: another model has its place"
            with pytest.raises(EngineStartError, match="the engine has ended"):
                await supervisor.wake_up()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT))


def test_an_engine_that_cannot_wake_up_ends() -> None:
    async def scenario() -> None:
        async with process(stub_engine.DROWSY) as (supervisor, _):
            assert await supervisor.sleep(LIMIT)
            with pytest.raises(EngineStartError, match="ended with exit code 1"):
                await supervisor.wake_up()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT))


def test_an_engine_that_cannot_sleep_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = SimpleNamespace(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr(process_module, "HeartbeatSender", lambda *_, **__: silent)
    reports: list[EngineReport] = []
    engine = EngineProcess(str(tmp_path), str(tmp_path), reports.append)
    try:
        for sleeper in (stub_engine.StubSleeper(stub_engine.RESTLESS), None):
            engine._carry_out(Sleep(), sleeper)
            assert engine._refuses is None, "it takes requests as before"
    finally:
        engine.close()
    assert reports == [Slept("no memory can be locked"), Slept("this engine was not started so that it can sleep")]
