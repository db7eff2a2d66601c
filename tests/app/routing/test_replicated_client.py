"""Several engines of one model behind one client, with real engine processes and a stub core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tessera.app.engines.engine_group import EngineGroup
from tessera.app.engines.engines import Engines
from tessera.app.engines.messages import EngineLaunch, engine_dir
from tessera.app.engines.replicated_client import ReplicatedClient
from tessera.app.engines.summed_stats import SummedStats
from tessera.app.ops.metrics_text import EngineTexts, render_metrics
from tessera.app.ops.server_process import ServerProcess
from tessera.app.routing.block_keys import block_keys
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, EngineError, EngineUnavailableError, InvalidRequestError
from tessera.engine.contract.messages import EngineTotals, Heartbeat, PrefixChanges, SchedulerStats
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.request_stream import RequestStream
from tessera.engine.ipc.supervisor import EngineSupervisor, make_run_dir
from tests.support.cases.token_ids import token_ids
from tests.support.fakes.fake_client import INFO, FakeClient, always, play
from tests.support.processes.stub_engines import until

DEADLINE = 20.0  # seconds; only a failing test waits this long
ENDLESS = SamplingParams(max_tokens=10**9)


@contextlib.asynccontextmanager
async def replicas(num_engines: int) -> AsyncIterator[tuple[Engines, ReplicatedClient, list[EngineSupervisor]]]:
    run_dir = make_run_dir()
    supervisors = []

    def supervise(number: int, config: EngineConfig, folder: Path, environment: dict[str, str]) -> EngineSupervisor:
        made = EngineSupervisor(
            config, folder, module="tests.support.fakes.stub_engine", owner_dir=run_dir, environment=environment
        )
        supervisors.append(made)
        return made

    config = EngineConfig(model="stub", device="cpu")
    group = EngineGroup(EngineLaunch(config=config, num_engines=num_engines), run_dir, 0, supervise)
    engines = Engines.of_run_dir(run_dir, {"stub": num_engines}, is_static=True)
    engines[0].status = msgspec.structs.replace(engines[0].status, state="loaded")
    client = engines[0].client
    assert isinstance(client, ReplicatedClient)
    group.start()
    await client.start()
    try:
        await group.wait_started()
        await client.wait_first_ready()
        yield engines, client, supervisors
    finally:
        await client.close()
        await group.stop(5.0)
        run_dir.rmdir()


def submit(client: ReplicatedClient, first: int, length: int, params: SamplingParams) -> tuple[int, RequestStream]:
    """A request, and the engine that it went to."""
    before = [len(member._inboxes) for member in client.members]
    (stream,) = client.submit_all([(token_ids(list(range(first, first + length))), params)])
    after = [len(member._inboxes) for member in client.members]
    (chosen,) = (number for number in range(len(before)) if after[number] > before[number])
    return chosen, stream


def test_requests_spread_stay_with_their_prefix_and_survive_an_engine() -> None:
    async def story() -> None:
        async with replicas(2) as (engines, client, supervisors):
            assert client.health() == (True, "all 2 engines are ready")
            first, one = submit(client, 100, 8, ENDLESS)
            second, other = submit(client, 200, 8, ENDLESS)
            assert {first, second} == {0, 1}, "the idle engine takes what nobody has cached"
            home, long = submit(client, 1000, 1600, SamplingParams(max_tokens=1))
            assert [output.token_ids async for output in long] == [[2600]]
            again, longer = submit(client, 1000, 1616, SamplingParams(max_tokens=1))
            assert again == home
            await longer.abort()

            victim = supervisors[0].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            lost, kept = (one, other) if first == 0 else (other, one)
            with pytest.raises(EngineError, match="the engine process ended while it worked on this request"):
                async for _ in lost:
                    pass
            well, reason = client.health()
            assert well, "one engine is left"
            assert reason == "engine 0: the engine process ended and is being restarted"
            for _ in range(4):
                chosen, stream = submit(client, 1000, 1600, SamplingParams(max_tokens=1))
                assert chosen == 1
                assert [output.finish_reason async for output in stream] == ["length"]
            text = (await render_metrics(engines, (), "tessera", EngineTexts(engines, 1.0), ServerProcess(0))).decode()
            assert 'tessera:engine_up{engine="0"} 0.0' in text
            assert 'tessera:engine_up{engine="1"} 1.0' in text
            assert (await kept.__anext__()).token_ids, "what ran on the other engine goes on"
            await until(lambda: client.health() == (True, "all 2 engines are ready"), "the engine's return")
            chosen, stream = submit(client, 1000, 1600, SamplingParams(max_tokens=1))
            assert chosen == 1, "what the dead engine had cached is forgotten"
            await stream.abort()
            await kept.abort()

    asyncio.run(story())


def test_reports_of_engines_reach_every_app_process() -> None:
    """A client routes to a prefix that another client's request left."""

    async def story() -> None:
        async with replicas(2) as (_, client, _):
            _, stream = submit(client, 0, 4, SamplingParams(max_tokens=1))
            await stream.abort()  # the index has its size now
            prompt = token_ids(list(range(500, 700)))
            keys = block_keys(prompt, 1, "", msgspec.structs.replace(INFO, max_model_len=2048))
            watcher = client.members[1].watcher
            assert watcher is not None
            watcher.on_prefixes(PrefixChanges(stored=b"".join(keys)))
            assert submit(client, 500, 200, SamplingParams(max_tokens=1))[0] == 1
            client._index.clear(1)
            watcher.on_prefixes(PrefixChanges(stored=b"".join(keys)))
            watcher.on_prefixes(PrefixChanges(evicted=b"".join(keys)))
            assert len(client._index) == 0

    asyncio.run(story())


def test_sequences_that_have_just_ended_are_not_taken_for_those_of_others(tmp_path: Path) -> None:
    """A heartbeat's figures may be from before their end."""
    client = EngineClient(tmp_path)
    client._epoch = "epoch"
    client._most_sequences = [5, 0]
    loads = []
    for number in range(3):
        beat = Heartbeat("epoch", number, True, True, stats(5, 0), stats_time=float(number))
        client._on_heartbeat(beat)
        loads.append(client.load)
    asyncio.run(client.close())
    assert loads == [0, 0, 5], "after two heartbeats they are others'"


def stats(running: int, tokens: int) -> SchedulerStats:
    totals = EngineTotals(
        num_prompt_tokens=tokens,
        num_generation_tokens=tokens,
        num_prefix_queries=0,
        num_prefix_hits=0,
        num_preemptions=0,
        num_finished={"stop": tokens},
        time_to_first_token=[tokens, 0],
        inter_token_latency=[0, tokens],
        e2e_latency=[tokens],
    )
    return SchedulerStats(running, 0, 1, 2, 3, totals)


def test_totals_never_go_back_when_an_engine_ends() -> None:
    summed = SummedStats()
    summed.note(0, stats(1, 10))
    summed.note(1, stats(2, 5))
    assert summed.sum() == msgspec.structs.replace(
        stats(3, 15), num_free_blocks=2, num_cached_blocks=4, num_used_blocks=6
    )
    summed.note_end(0)
    assert summed.sum() == stats(2, 15)
    summed.note(0, stats(1, 1))
    found = summed.sum()
    assert found.totals is not None
    assert found.totals.num_finished == {"stop": 16}
    assert found.num_running == 3


def launch_of(num_engines: int, **settings: Any) -> list[tuple[EngineConfig, Path, dict[str, str]]]:
    found: list[tuple[EngineConfig, Path, dict[str, str]]] = []

    def supervise(number: int, config: EngineConfig, folder: Path, environment: dict[str, str]) -> Any:
        found.append((config, folder, environment))

    run_dir = make_run_dir()
    try:
        launch = EngineLaunch(config=EngineConfig(model="m", **settings), num_engines=num_engines)
        EngineGroup(launch, run_dir, 3, supervise)
        assert [folder for _, folder, _ in found] == [engine_dir(run_dir, 3, number) for number in range(num_engines)]
    finally:
        for folder in run_dir.iterdir():
            folder.rmdir()
        run_dir.rmdir()
    return found


def test_each_engine_has_a_device_and_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engines = launch_of(2, kv_offload_gib=1.0, kv_offload_dir="/kv")
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, _, environment in engines] == ["0", "1"]
    assert [config.kv_offload_dir for config, _, _ in engines] == ["/kv", "/kv/engine-1"]
    assert all(config.reports_prefixes for config, _, _ in engines)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-ab12")
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, _, environment in launch_of(2)] == ["4", "GPU-ab12"]
    with pytest.raises(ConfigError, match="needs 3 devices, but CUDA_VISIBLE_DEVICES=4, GPU-ab12 names 2"):
        launch_of(3)
    assert "CUDA_VISIBLE_DEVICES" not in launch_of(3, device="cpu")[2][2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    ranks = launch_of(2, tensor_parallel_size=2)
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, _, environment in ranks] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="--data-parallel-size 3 with --tensor-parallel-size 2 needs 6 devices"):
        launch_of(3, tensor_parallel_size=2)


def test_one_engine_is_started_as_ever() -> None:
    ((config, _, environment),) = launch_of(1, kv_offload_gib=1.0, kv_offload_dir="/kv")
    assert config == EngineConfig(model="m", kv_offload_gib=1.0, kv_offload_dir="/kv")
    assert environment == {}


def test_engines_on_devices_of_different_kinds_are_refused() -> None:
    class Started:
        def __init__(self, number: int) -> None:
            self.number = number

        async def wait_started(self) -> Any:
            changes = {"device": "cuda"} if self.number == 0 else {"device": "cpu", "device_reason": "no device 1"}
            return msgspec.structs.replace(INFO, **changes)

    run_dir = make_run_dir()

    def supervise(number: int, *_: Any) -> Any:
        return Started(number)

    group = EngineGroup(EngineLaunch(config=EngineConfig(model="m"), num_engines=2), run_dir, 0, supervise)
    with pytest.raises(ConfigError, match=r"needs 2 devices of one kind, but engine 1 runs on cpu \(no device 1\)"):
        asyncio.run(group.wait_started())
    for folder in run_dir.iterdir():
        folder.rmdir()
    run_dir.rmdir()


class AdapterMember(FakeClient):
    """An engine of which some folders cannot be read."""

    watcher: Any = None

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(always(play([5])))
        self.refuses = refuses

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False, by_server: bool = False) -> None:
        if self.refuses:
            raise InvalidRequestError("the folder is lost")
        await super().load_adapter(name, folder, replace=replace)


def test_adapters_are_loaded_by_all_engines_or_by_none() -> None:
    async def story() -> None:
        members = [AdapterMember(), AdapterMember()]
        client = ReplicatedClient(cast(Any, members))
        await client.load_adapter("one", "/adapters/one")
        assert [list(member.adapters or ()) for member in members] == [["one"], ["one"]]
        members[1].refuses = True
        with pytest.raises(InvalidRequestError, match="the folder is lost"):
            await client.load_adapter("two", "/adapters/two")
        assert list(client.adapters or ()) == ["one"]
        members[1].well = False
        with pytest.raises(EngineUnavailableError, match="not all engines are ready"):
            await client.unload_adapter("one")
        members[1].well = True
        await client.unload_adapter("one")
        assert not client.adapters

    asyncio.run(story())
