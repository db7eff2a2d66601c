"""The pool of engines with stand-ins for the engine processes: room, order, idleness, sleep, failures."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tessera.app.engines import engines as engines_module
from tessera.app.engines import pool as pool_module
from tessera.app.engines.engines import Engines
from tessera.app.engines.messages import EngineLaunch, FromPool, Yield
from tessera.app.engines.pool import EnginePool
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import EngineUnavailableError
from tests.app.engines.supervisors import FakeSupervisor, no_processes

__all__ = ["no_processes"]

LIMIT = 20.0  # seconds; only a failing test waits this long


def run(
    tmp_path: Path,
    models: dict[str, float],
    story: Callable[[Engines, EnginePool], Awaitable[None]],
    *,
    patience: float = LIMIT,
    keep_alive: float | None = None,
    host_bytes: int = 0,
) -> None:
    """`models`: shares by name."""

    async def play() -> None:
        launches = [
            EngineLaunch(
                config=EngineConfig(model=name, served_name=name, gpu_memory_utilization=share),
                keep_alive=keep_alive,
                preload=False,
            )
            for name, share in models.items()
        ]
        pool = EnginePool(tmp_path, launches, budget=0.9, patience=patience, host_bytes=host_bytes)
        await pool.listen()
        engines = Engines.of_run_dir(tmp_path, dict.fromkeys(models, 1), is_static=False)
        await engines.start()
        await until(lambda: engines._writer is not None)
        try:
            await story(engines, pool)
        finally:
            await engines.close()
            await pool.stop(1.0)

    asyncio.run(asyncio.wait_for(play(), LIMIT))


@pytest.mark.parametrize("names", [(), ("a", "b"), ("broken",)], ids=str)
def test_processes_of_preloaded_models_are_waited_for(names: tuple[str, ...], tmp_path: Path) -> None:
    """So that they load while the server imports the rest."""

    async def play() -> None:
        FakeSupervisor.launch, FakeSupervisor.gate = asyncio.Event(), asyncio.Event()
        launches = [
            EngineLaunch(config=EngineConfig(model=name, served_name=name, gpu_memory_utilization=0.4))
            for name in names
        ]
        pool = EnginePool(tmp_path, launches)
        pool.start()
        waiting = asyncio.create_task(pool.wait_launched())
        for _ in range(20):
            await asyncio.sleep(0)
        assert waiting.done() == (not names)
        FakeSupervisor.launch.set()
        await waiting  # none has started yet
        await pool.stop(1.0)

    asyncio.run(asyncio.wait_for(play(), LIMIT))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def use(engines: Engines, *indices: int) -> None:
    """One request of each, one after the other."""
    for index in indices:
        await engines.hold(index, LIMIT)
        engines.release(index)


def test_the_longest_unused_goes_and_no_more_than_needed(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0, 1, 2, 0)
        await use(engines, 3)
        assert FakeSupervisor.stopped == ["b"], "a was used after it, and c is not needed"
        await use(engines, 4)
        assert FakeSupervisor.stopped == ["b", "c", "a", "d"], "all that are loaded, for the one that takes it all"

    run(tmp_path, {"a": 0.3, "b": 0.3, "c": 0.3, "d": 0.3, "all": 0.9}, story)


def test_a_slow_app_process_is_heard_before_a_model_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused model may be held by a process that is late to release it."""

    async def story(engines: Engines, pool: EnginePool) -> None:
        other = Engines.of_run_dir(tmp_path, dict.fromkeys("abc", 1), is_static=False)
        await other.start()
        await until(lambda: other._writer is not None)
        hear, late = other._take, asyncio.Event()

        def take_late(message: FromPool) -> None:
            if isinstance(message, Yield):
                asyncio.get_running_loop().call_later(0.1, hear, message)
                late.set()
            else:
                hear(message)

        monkeypatch.setattr(other, "_take", take_late)
        monkeypatch.setattr(engines_module, "LINGER", LIMIT)  # only `Yield` has a model released
        await use(other, 0)
        await use(engines, 1, 2)
        assert late.is_set()
        assert FakeSupervisor.stopped == ["a"]
        await other.close()

    run(tmp_path, {"a": 0.4, "b": 0.4, "c": 0.4}, story)


def test_what_is_used_or_at_work_stays_and_the_wait_is_bounded(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await engines.hold(0, LIMIT)
        await use(engines, 1)
        FakeSupervisor.at_work.add("b")  # a batch, say, whose requests have no client
        with pytest.raises(EngineUnavailableError, match="no room for the model 'c': a, b are in use") as caught:
            await engines.hold(2, LIMIT)
        assert caught.value.code == "no_room_for_model"
        assert FakeSupervisor.stopped == []
        FakeSupervisor.at_work.clear()
        await use(engines, 2)
        assert FakeSupervisor.stopped == ["b"]
        engines.release(0)

    run(tmp_path, {"a": 0.5, "b": 0.4, "c": 0.4}, story, patience=0.2)


def test_a_request_waits_for_room_that_comes_in_time(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await engines.hold(0, LIMIT)
        waiting = asyncio.create_task(engines.hold(1, LIMIT))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engines.release(0)
        await waiting
        assert FakeSupervisor.stopped == ["a"]

    run(tmp_path, {"a": 0.9, "b": 0.9}, story)


def test_many_requests_load_a_model_once_and_give_up_in_time(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        gate = FakeSupervisor.gate = asyncio.Event()
        waiting = [asyncio.create_task(engines.hold(0, LIMIT)) for _ in range(20)]
        with pytest.raises(EngineUnavailableError, match=r"was not loaded within 0\.05 seconds") as caught:
            await engines.hold(0, 0.05)
        assert caught.value.code == "model_loading"
        gate.set()
        await asyncio.gather(*waiting)
        assert FakeSupervisor.started == ["a"]

    run(tmp_path, {"a": 0.9}, story)


def test_two_models_that_want_all_room_take_turns(tmp_path: Path) -> None:
    """A model that was just loaded is not taken away before the request that it was loaded for."""

    async def client(engines: Engines, index: int) -> None:
        for _ in range(5):
            await use(engines, index)

    async def story(engines: Engines, pool: EnginePool) -> None:
        await asyncio.gather(*(client(engines, index) for index in (0, 1, 0, 1)))
        assert len(FakeSupervisor.started) <= 20

    run(tmp_path, {"a": 0.9, "b": 0.9}, story)


def test_idle_models_are_unloaded_after_their_time(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0, 1)
        engines.keep(1, math.inf)
        await until(lambda: FakeSupervisor.stopped == ["a"])
        await until(lambda: engines[0].status.state == "unloaded")
        assert engines[1].status.state == "loaded"
        assert engines[1].status.expires_at == 0

    run(tmp_path, {"a": 0.4, "b": 0.4}, story, keep_alive=0.05)


def test_a_sleeping_model_is_loaded_by_wake_alone(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0)
        await engines.sleep(0)
        await until(lambda: engines[0].status.state == "asleep")
        with pytest.raises(EngineUnavailableError, match="asleep until POST /wake_up"):
            await engines.hold(0, LIMIT)
        await use(engines, 1)
        assert FakeSupervisor.stopped == ["a"], "what sleeps takes no room"
        await engines.wake(0)
        await use(engines, 0)
        assert FakeSupervisor.stopped == ["a", "b"]

    run(tmp_path, {"a": 0.9, "b": 0.9}, story)


def test_a_failed_load_is_tried_again_later_and_tells_clients_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match="as the server's log says") as caught:
                await engines.hold(0, LIMIT)
            assert "/secret" not in str(caught.value)
        assert "the model broken could not be loaded: the folder /secret is wrong" in caplog.text
        assert FakeSupervisor.started == ["broken"]
        monkeypatch.setattr(pool_module, "RETRY_DELAY", 0.0)
        with pytest.raises(EngineUnavailableError):
            await engines.hold(0, LIMIT)
        assert FakeSupervisor.started == ["broken", "broken"]
        await use(engines, 1)

    run(tmp_path, {"broken": 0.5, "b": 0.9}, story)


# -- sleep, with weights in host memory -----------------------------------------------------------


def test_the_longest_unused_sleeps_where_host_memory_allows(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        for _ in range(3):
            await use(engines, 0, 1)
        assert FakeSupervisor.started == ["a", "b"], "each is read once"
        assert FakeSupervisor.stopped == []
        assert FakeSupervisor.slept == ["a", "b", "a", "b", "a"]
        assert FakeSupervisor.woken == ["a", "b", "a", "b"]
        await until(lambda: engines[1].status.state == "loaded")
        a, b = engines[0].status, engines[1].status
        assert (a.state, a.in_host_memory, a.host_bytes, a.num_loads, a.num_wakes) == ("unloaded", True, 100, 1, 2)
        assert (b.in_host_memory, b.host_bytes, b.num_wakes) == (False, 100, 2)

    FakeSupervisor.sleep_bytes = 100
    run(tmp_path, {"a": 0.9, "b": 0.9}, story, host_bytes=250)


def test_the_longest_asleep_leaves_host_memory_for_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0, 1, 2, 3)
        assert FakeSupervisor.stopped == ["a"], "two have room"
        assert "the model a leaves host memory: it makes room for c" in caplog.text
        assert not engines[0].status.in_host_memory
        await use(engines, 1, 0)
        assert FakeSupervisor.woken == ["b"]
        assert FakeSupervisor.started == ["a", "b", "c", "d", "a"]

    FakeSupervisor.sleep_bytes = 100
    with caplog.at_level("INFO"):
        run(tmp_path, dict.fromkeys("abcd", 0.9), story, host_bytes=200)


@pytest.mark.parametrize(("needed", "bound"), [(100, 99), (None, 1000)])
def test_a_model_without_room_in_host_memory_is_ended(tmp_path: Path, needed: int | None, bound: int) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0, 1)
        assert (FakeSupervisor.slept, FakeSupervisor.stopped) == ([], ["a"])

    FakeSupervisor.sleep_bytes = needed
    run(tmp_path, {"a": 0.9, "b": 0.9}, story, host_bytes=bound)


def test_what_cannot_sleep_is_ended_and_what_cannot_wake_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        FakeSupervisor.restless.add("a")
        await use(engines, 0, 1)
        assert (FakeSupervisor.slept, FakeSupervisor.stopped) == (["a"], ["a"])
        assert "the model a is ended, as it could not sleep" in caplog.text
        await use(engines, 0)
        FakeSupervisor.restless.add("b")
        await use(engines, 1)
        assert "the model b is read again, as it could not be woken: its memory is taken" in caplog.text
        assert FakeSupervisor.started == ["a", "b", "a", "b"]
        assert engines[1].status.state == "loaded"

    FakeSupervisor.sleep_bytes = 100
    run(tmp_path, {"a": 0.9, "b": 0.9}, story, host_bytes=1000)


@pytest.mark.parametrize("level", [1, 2])
def test_levels_of_sleep(tmp_path: Path, level: int) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0)
        await engines.sleep(0, keep=level == 1)
        assert engines[0].status.state == "asleep"
        assert engines[0].status.in_host_memory is (level == 1)
        with pytest.raises(EngineUnavailableError, match="asleep until POST /wake_up"):
            await engines.hold(0, LIMIT)
        await use(engines, 1)
        assert FakeSupervisor.stopped == ([] if level == 1 else ["a"]), "what sleeps takes no room"
        await engines.sleep(1)
        await engines.wake(0)
        await use(engines, 0)
        assert FakeSupervisor.woken == (["a"] if level == 1 else [])
        await engines.sleep(0)
        await engines.sleep(0, keep=False)
        await until(lambda: not engines[0].status.in_host_memory)
        assert engines[0].status.state == "asleep"

    FakeSupervisor.sleep_bytes = 100
    run(tmp_path, {"a": 0.9, "b": 0.9}, story, host_bytes=1000)


@pytest.mark.parametrize("can_sleep", [True, False])
def test_a_model_that_is_told_to_sleep_while_it_makes_room(tmp_path: Path, can_sleep: bool) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0)
        dusk = FakeSupervisor.dusk = asyncio.Event()
        if not can_sleep:
            FakeSupervisor.restless.add("a")
        other = asyncio.create_task(use(engines, 1))
        await until(lambda: engines[0].status.state == "unloading")
        ordered = asyncio.create_task(engines.sleep(0))
        await until(lambda: engines[0].status.state == "asleep")
        dusk.set()
        await asyncio.gather(ordered, other)
        await until(lambda: engines[1].status.state == "loaded")
        assert (engines[0].status.state, engines[0].status.in_host_memory) == ("asleep", can_sleep)

    FakeSupervisor.sleep_bytes = 100
    run(tmp_path, {"a": 0.9, "b": 0.9}, story, host_bytes=1000)


def test_idle_models_go_to_host_memory(tmp_path: Path) -> None:
    async def story(engines: Engines, pool: EnginePool) -> None:
        await use(engines, 0)
        await until(lambda: engines[0].status.in_host_memory)
        assert engines[0].status.state == "unloaded"
        await use(engines, 0)
        assert (FakeSupervisor.started, FakeSupervisor.stopped) == (["a"], [])

    FakeSupervisor.sleep_bytes = 100
    run(tmp_path, {"a": 0.4}, story, keep_alive=0.05, host_bytes=1000)


def test_many_requests_for_many_models_in_any_order(tmp_path: Path) -> None:
    """Models come and go while others sleep, wake and leave host memory: each request gets its model."""

    async def client(engines: Engines, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            index = rng.randrange(4)
            await engines.hold(index, LIMIT)
            status = engines[index].status
            assert (status.state, status.in_host_memory) == ("loaded", False)
            await asyncio.sleep(0)
            engines.release(index)

    async def story(engines: Engines, pool: EnginePool) -> None:
        await asyncio.gather(*(client(engines, seed) for seed in range(5)))
        assert FakeSupervisor.woken
        kept = sum(model.host_bytes for model in pool._models)
        assert kept <= 200
        ups = len(FakeSupervisor.started) - len(FakeSupervisor.stopped)
        assert ups == sum(model.group is not None for model in pool._models)

    FakeSupervisor.sleep_bytes = 100
    run(tmp_path, dict.fromkeys("abcd", 0.45), story, host_bytes=200)
