"""Models that have no room together, asked for by several keys, on virtual time and with stand-ins for the engines."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tessera.app.engines import engines as engines_module
from tessera.app.engines import pool as pool_module
from tessera.app.engines import turns
from tessera.app.engines.engines import MAX_WAITING, Engines
from tessera.app.engines.messages import EngineLaunch, FromPool, ToPool
from tessera.app.engines.pool import EnginePool
from tessera.app.engines.pooled_model import Link
from tessera.app.engines.turns import TURN
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import EngineUnavailableError, QueueFullError
from tests.app.engines.supervisors import AlwaysReady, FakeSupervisor, no_processes
from tests.simulation.virtual_loop import VirtualLoop

__all__ = ["no_processes"]

PATIENCE = 120.0
LATENCY = 0.002  # seconds of a message
MALLORY, ALICE = 1, 2
OTHERS = (2, 3, 4)


class Sender:
    """In the place of a link's stream: what is written together is read together, later and in order."""

    def __init__(self, loop: VirtualLoop, read: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._read = read
        self._sent: deque[bytes] = deque()

    def write(self, data: bytes) -> None:
        self._sent.append(data)
        self._loop.call_later(LATENCY, self._deliver)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _deliver(self) -> None:
        for line in self._sent.popleft().splitlines():
            self._read(line)


class World:
    """A pool and app processes.

    Attributes:
        served: (start, end, account, model) of every request.
        longest_wait, num_refused: of a request, and requests, by account.
    """

    def __init__(self, loop: VirtualLoop, run_dir: Path, shares: dict[str, float], num_processes: int) -> None:
        self.loop = loop
        launches = [
            EngineLaunch(config=EngineConfig(model=name, served_name=name, gpu_memory_utilization=share), preload=False)
            for name, share in shares.items()
        ]
        self.pool = EnginePool(run_dir, launches, budget=0.9, patience=PATIENCE)
        self.pool._looking = loop.create_task(self.pool._look_for_idle())
        self.processes = [self._process(run_dir, shares) for _ in range(num_processes)]
        self.served: list[tuple[float, float, int, int]] = []
        self.longest_wait: Counter[int] = Counter()
        self.num_refused: Counter[int] = Counter()

    def _process(self, run_dir: Path, shares: dict[str, float]) -> Engines:
        engines = Engines.of_run_dir(run_dir, dict.fromkeys(shares, 1), is_static=False)
        down: Any = Sender(self.loop, lambda line: engines._take(msgspec.json.decode(line, type=FromPool)))
        link = Link(down)
        up: Any = Sender(self.loop, lambda line: self.pool._handle(link, msgspec.json.decode(line, type=ToPool)))
        engines._writer = up
        self.pool._links.add(link)
        link.send(self.pool._statuses())
        return engines

    async def request(self, account: int, model: int, seconds: float, process: int = 0) -> None:
        engines, asked = self.processes[process], self.loop.time()
        await engines.hold(model, PATIENCE, account)
        start = self.loop.time()
        self.longest_wait[account] = max(self.longest_wait[account], round(start - asked))
        num_stops = len(FakeSupervisor.stopped)
        await asyncio.sleep(seconds)
        name = self.pool._models[model].name
        assert name not in FakeSupervisor.stopped[num_stops:], "a model is loaded as long as it is used"
        assert self.pool._models[model].state == "loaded"
        engines.release(model)
        self.served.append((start, self.loop.time(), account, model))

    async def flood(self, account: int, model: int, *, until: float, seconds: float = 5.0) -> None:
        """Requests of which one is always running, unless they have to wait."""

        async def stream(offset: float, process: int) -> None:
            await asyncio.sleep(offset)
            while self.loop.time() < until:
                try:
                    await self.request(account, model, seconds, process)
                except EngineUnavailableError:
                    self.num_refused[account] += 1
                    await asyncio.sleep(2)

        number = len(self.processes)
        await asyncio.gather(*(stream(seconds * i / 3, i % number) for i in range(3)))

    def time_of(self, account: int) -> float:
        """Seconds in which a request of the account ran."""
        end, total = 0.0, 0.0
        for start, stop, *_ in sorted(each for each in self.served if each[2] == account):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total


@contextmanager
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time)
    for module in (pool_module, engines_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(pool_module, "LOOK_INTERVAL", 0.5)
    monkeypatch.setattr(engines_module, "LINGER", 1.0)
    monkeypatch.setattr(engines_module, "EngineClient", AlwaysReady)
    try:
        yield loop
    finally:
        loop.close()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def play(shares: dict[str, float], story: Callable[[World], Awaitable[None]], *, num_processes: int = 1) -> World:
        with virtual_time(monkeypatch) as loop:

            async def run() -> World:
                world = World(loop, tmp_path, shares, num_processes)
                await asyncio.sleep(1)
                await story(world)
                await asyncio.sleep(5)
                await world.pool.stop(1.0)
                await asyncio.sleep(5)
                return world

            return loop.run_until_complete(run())

    return play


@pytest.mark.parametrize("num_processes", [1, 2])
def test_fault_fairness_endless_requests_for_one_model_leave_room_for_another_keys(
    play: Callable[..., World], num_processes: int
) -> None:
    async def story(world: World) -> None:
        end = world.loop.time() + 1200
        await asyncio.gather(world.flood(MALLORY, 0, until=end), world.flood(ALICE, 1, until=end))

    world = play({"a": 0.9, "b": 0.9}, story, num_processes=num_processes)
    for account in (MALLORY, ALICE):
        assert world.longest_wait[account] < TURN + 10, "its turn comes after the other's, and what runs then"
        assert 0.4 < world.time_of(account) / 1200 < 0.6
    starts = FakeSupervisor.started
    assert starts == ["a", "b"] * (len(starts) // 2) + ["a"] * (len(starts) % 2)
    assert 1200 / (TURN + 10) <= len(starts) <= 1200 / TURN + 1


def test_a_turn_is_not_cut_short_and_what_runs_at_its_end_ends(play: Callable[..., World]) -> None:
    async def story(world: World) -> None:
        begin = world.loop.time()
        first = asyncio.ensure_future(world.request(MALLORY, 0, 100))
        await asyncio.sleep(10)
        waiting = asyncio.ensure_future(world.request(ALICE, 1, 1))
        await asyncio.sleep(TURN - 20)
        await world.request(MALLORY, 0, 1)
        assert world.longest_wait[MALLORY] == 0, "its turn is not over yet"
        await asyncio.sleep(20)
        late = asyncio.ensure_future(world.request(MALLORY, 0, 1))
        await asyncio.gather(first, waiting, late)
        times = {(account, round(start - begin)) for start, _, account, _ in world.served}
        assert times == {(MALLORY, 0), (MALLORY, 50), (ALICE, 100), (MALLORY, 101)}

    play({"a": 0.9, "b": 0.9}, story)


def test_one_account_has_no_turns(play: Callable[..., World]) -> None:
    """A model that is in use stays, whatever else the same key asks for, and however many others wait for nothing."""

    async def story(world: World) -> None:
        flood = asyncio.ensure_future(world.flood(ALICE, 0, until=world.loop.time() + 400))
        await asyncio.sleep(100)
        with pytest.raises(EngineUnavailableError) as caught:
            await world.request(ALICE, 1, 1)
        await asyncio.sleep(2)
        assert caught.value.code in ("no_room_for_model", "model_loading")
        assert world.pool._models[1].state == "unloaded"
        await flood
        assert world.longest_wait[ALICE] <= 1

    play({"a": 0.9, "b": 0.9}, story)
    assert FakeSupervisor.started == ["a"]


def test_fault_fairness_turns_are_those_of_keys_and_not_of_models(play: Callable[..., World]) -> None:
    """One key that floods four models has no more turns than those with a single one, where two have room."""

    async def story(world: World) -> None:
        end = world.loop.time() + 2400
        floods = [(MALLORY, model) for model in range(4)] + [(account, account + 2) for account in OTHERS]
        await asyncio.gather(*(world.flood(account, model, until=end) for account, model in floods))

    world = play(dict.fromkeys("abcdefg", 0.45), story)
    for account in OTHERS:
        assert world.time_of(account) > 0.4 * 2400
    assert set("abcdefg") == set(FakeSupervisor.started)


def test_fault_fairness_a_large_model_finds_room_among_small_ones_that_come_and_go(play: Callable[..., World]) -> None:
    """Which fill the room one after the other, so that it is never all free."""

    async def story(world: World) -> None:
        async def come_and_go(account: int, model: int, offset: float) -> None:
            await asyncio.sleep(offset)
            while world.loop.time() < end:
                try:
                    await world.request(account, model, 40)
                except EngineUnavailableError:
                    await asyncio.sleep(2)
                await asyncio.sleep(3)

        end = world.loop.time() + 900
        small = [come_and_go(MALLORY + 10 * model, model, 15 * model) for model in range(3)]

        async def large() -> None:
            await asyncio.sleep(100)
            for _ in range(4):
                await world.request(ALICE, 3, 5)
                await asyncio.sleep(60)

        await asyncio.gather(*small, large())

    world = play({"a": 0.4, "b": 0.4, "c": 0.4, "all": 0.9}, story)
    assert world.longest_wait[ALICE] < 2 * TURN


def test_fault_fairness_a_queue_that_one_key_has_filled_takes_others_requests(play: Callable[..., World]) -> None:
    async def story(world: World) -> None:
        running = asyncio.ensure_future(world.request(OTHERS[-1], 0, 100))
        await asyncio.sleep(1)
        many = [asyncio.ensure_future(world.request(MALLORY, 1, 1)) for _ in range(2 * MAX_WAITING)]
        await asyncio.sleep(1)
        await asyncio.gather(running, *(world.request(ALICE, 1, 1) for _ in range(10)))
        results = await asyncio.gather(*many, return_exceptions=True)
        assert sum(isinstance(result, QueueFullError) for result in results) == MAX_WAITING

    play({"a": 0.9, "b": 0.9}, story)


def test_a_model_whose_room_is_not_needed_any_more_goes_on(play: Callable[..., World]) -> None:
    """Another one has ended before it, so there is room beside it."""

    async def story(world: World) -> None:
        long = asyncio.ensure_future(world.request(MALLORY, 0, 300))
        other = asyncio.ensure_future(world.request(MALLORY, 1, 90))
        await asyncio.sleep(TURN + 10)
        waiting = asyncio.ensure_future(world.request(ALICE, 2, 1))
        await asyncio.sleep(1)
        assert [model.makes_way for model in world.pool._models] == [True, False, False]
        late = asyncio.ensure_future(world.request(MALLORY, 0, 1))
        await asyncio.gather(waiting, late)
        assert not long.done()
        assert world.longest_wait[MALLORY] < 30
        await asyncio.gather(long, other)

    play({"a": 0.4, "b": 0.4, "c": 0.4}, story)
    assert FakeSupervisor.started == ["a", "b", "c"]


@pytest.mark.parametrize("seed", range(20))
def test_fault_liveness_whatever_keys_ask_for_each_request_is_served_in_its_turn(
    play: Callable[..., World], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, longest_request = 4.0, 20.0
    monkeypatch.setattr(turns, "TURN", turn)
    rng = random.Random(seed)
    shares = {name: rng.choice([0.2, 0.3, 0.45, 0.6, 0.9]) for name in "abcde"[: rng.randint(2, 5)]}
    num_accounts = rng.randint(2, 4)
    longest: Counter[int] = Counter()  # from the first try of a request to its end

    async def story(world: World) -> None:
        async def client(account: int, process: int) -> None:
            while world.loop.time() < end:
                model, first = rng.randrange(len(shares)), world.loop.time()
                seconds = rng.choice([0.0, 0.1, 3.0, longest_request])
                while True:
                    try:
                        await world.request(account, model, seconds, process)
                    except EngineUnavailableError:
                        await asyncio.sleep(2)
                    else:
                        break
                longest[account] = max(longest[account], round(world.loop.time() - first))
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.01, 1.0, 10.0]))

        end = world.loop.time() + 1000
        await asyncio.gather(*(client(account, i % 2) for i in range(3) for account in range(num_accounts)))
        await asyncio.sleep(10)
        assert all(model.is_unused and not model.makes_way for model in world.pool._models)
        assert not world.pool._turns._line

    world = play(shares, story, num_processes=2)
    assert len(world.served) > 100
    bound = num_accounts * len(shares) * (turn + longest_request + 5)
    assert max(longest.values()) < bound, "a turn of every account for each model, and what runs at its end"
