"""One history: a world, its requests and its faults, all drawn from a seed, and what must hold in the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tessera.app.generate import generation
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import EngineInfo
from tessera.engine.contract.passes import pass_queue
from tessera.engine.ipc import client, engine_process, heartbeat, supervisor
from tessera.engine.ipc.client import EngineClient
from tessera.engine.ipc.sockets import connection
from tessera.engine.ipc.supervisor import EngineStartError, EngineState
from tessera.engine.kv_tiers.tiers import KVTiers
from tessera.engine.speculation import suffixes
from tests.simulation.drafts import Drafts, draw_drafts
from tests.simulation.invariants import check_quiet
from tests.simulation.processes import (
    RUN_DIR,
    Heart,
    SimulatedEngine,
    SimulatedSupervisor,
    echoed_token,
    engine_info,
    hashed_token,
)
from tests.simulation.requests import Plan, SimulatedRequest, expected_answer, make_plan
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.wire import Wire
from tests.support.fakes.fake_runner import FakeRunner
from tests.support.fakes.fake_tiers import MemoryFiles, make_fake_tiers

MAX_MODEL_LEN = 64
FAULT_SECONDS = 2.0  # in which requests and faults begin
SETTLED = 0.5  # seconds in which aborts arrive
AFTERMATH = 2.0  # seconds in which a step that hung for long may still have its engine killed
MOST_STARTS = 10  # after a night; requests ask the pool for more
SLEEP_TIMEOUT = 60.0  # seconds to wake up, as the pool has it
DROP_SECONDS = 10.0
RECOVERY = 240.0  # seconds within which all has ended and the server serves again
MORE_REQUESTS = 8  # in worlds with tiers, whose prefixes are to be evicted and asked for again
FAULTS = ("kill", "stop", "stop for long", "hang", "exception", "no descriptors", "reset", "bad starts", "night")


@dataclass(frozen=True)
class Tiers:
    """Host memory of `num_slots` blocks, and `files`, which outlive engines; copies and disks have faults."""

    num_slots: int
    fault_rate: float
    files: MemoryFiles | None
    max_files: int

    def make(self, rng: random.Random, runner: FakeRunner, clock: Callable[[], float]) -> KVTiers:
        return make_fake_tiers(
            rng,
            runner.planes,
            self.num_slots,
            fault_rate=self.fault_rate,
            files=self.files,
            max_files=self.max_files,
            clock=clock,
        )


def draw_tiers(rng: random.Random) -> Tiers | None:
    """In a third of the worlds there are some."""
    if rng.random() < 0.67:
        return None
    files = MemoryFiles(rng, full_rate=rng.choice((0, 0.05)), corrupt_rate=rng.choice((0, 0.1)))
    return Tiers(
        num_slots=rng.choice((1, 5, 20, 60)),
        fault_rate=rng.choice((0, 0, 0.01)),
        files=rng.choice((None, files)),
        max_files=rng.choice((2, 20, 100)),
    )


@dataclass(frozen=True)
class World:
    config: EngineConfig
    num_apps: int
    num_blocks: int
    max_model_len: int
    asynchronous: bool
    info: EngineInfo
    tiers: Tiers | None
    drafts: Drafts | None

    def say(self, context: Sequence[int]) -> int:
        """The model's token after a context; -1 for logits that are not finite."""
        return echoed_token(context) if self.drafts is not None and self.drafts.echoes else hashed_token(context)

    @property
    def context(self) -> int:
        return min(self.max_model_len, self.num_blocks * self.config.block_size)


def make_world(rng: random.Random, tiers: Tiers | None, drafts: Drafts | None) -> World:
    max_num_seqs = rng.randint(1, 6)
    config = EngineConfig(
        model="simulated",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice((max_num_seqs, max_num_seqs + 5, 40)),
        max_queue_len=rng.choice((2, 10, 100)),
        block_size=cast(Any, 4 if tiers is not None else 8),  # smaller than a model may have
        prefix_caching=rng.random() < 0.8,
        **(drafts.settings if drafts is not None else {}),
    )
    num_blocks = rng.randint(3, 16)
    return World(
        config=config,
        num_apps=rng.choice((1, 1, 2)),
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        asynchronous=rng.random() < 0.5,
        info=engine_info(config, MAX_MODEL_LEN, num_blocks),
        tiers=tiers,
        drafts=drafts,
    )


class History:
    """Runs the history of one seed; `run` raises what was found wrong, and returns a digest of all events."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None, *, drafts: bool = False) -> None:
        """With `drafts` tokens are drafted whatever the seed says."""
        self.rng = random.Random(seed)
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(self._on_fault)
        self._fault: BaseException | None = None
        self.wire = Wire(self.loop, self.rng)
        tiers, drafting = (random.Random(f"{part} of {seed}") for part in ("tiers", "drafts"))
        self.world = make_world(self.rng, draw_tiers(tiers), draw_drafts(drafting, MAX_MODEL_LEN, always=drafts))
        self.run_dir = Path(RUN_DIR)
        self.clients: list[EngineClient] = []
        self.engines: list[SimulatedEngine] = []
        self.had_faults = False
        self.digest = 0
        self.num_events = 0
        self._tell = tell
        self._bad_starts = 0
        self._nights: set[asyncio.Task[None]] = set()
        self.slow_steps = self.rng.random() < 0.1

    def note(self, *event: object) -> None:
        self.num_events += 1
        line = f"{self.loop.now:.6f} {event}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self._tell is not None:
            self._tell(line)

    def run(self) -> int:
        try:
            with simulated_modules(self):
                self._run_to_end()
        except BaseException:
            self._drop_all()
            raise
        finally:
            self.loop.close()
        return self.digest

    def _run_to_end(self) -> None:
        def stop(main: asyncio.Task[None]) -> None:
            self.loop.stop()

        main = self.loop.create_task(self._run())
        main.add_done_callback(stop)
        try:
            self.loop.run_forever()
        finally:
            main.remove_done_callback(stop)
        if self._fault is not None:
            raise self._fault
        main.result()

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that only the event loop saw ends the history: what should follow may never come."""
        self._fault = self._fault or context.get("exception") or AssertionError(context["message"])
        loop.stop()

    def _drop_all(self) -> None:
        """After a failure nothing goes on."""
        self.loop.set_exception_handler(lambda loop, context: None)
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(AssertionError):  # what was wrong may go on until the loop gives up
            self.loop.run_until_complete(asyncio.sleep(DROP_SECONDS))

    def count_drafts(self) -> Counter[tuple[str, str]]:
        """Draft tokens, accepted and rejected, by their source."""
        found: Counter[tuple[str, str]] = Counter()
        for core in [engine.core for engine in self.engines if engine.core is not None]:
            by_source = core.metrics.speculator.by_source if core.metrics.speculator is not None else {}
            for source, counts in by_source.items():
                found[source, "accepted"] += counts.num_accepted
                found[source, "rejected"] += counts.num_tokens - counts.num_accepted
        return found

    def step_seconds(self) -> float:
        return self.rng.random() * (1.0 if self.slow_steps else 0.02)

    def fails_to_start(self) -> bool:
        self._bad_starts -= 1
        return self._bad_starts >= 0

    async def _run(self) -> None:
        rng, world = self.rng, self.world
        self.supervisor = SimulatedSupervisor(self)
        self.supervisor.start()
        for _ in range(world.num_apps):
            self.clients.append(EngineClient(RUN_DIR))
            await self.clients[-1].start()
        await asyncio.wait_for(self.clients[0].wait_first_ready(), RECOVERY)
        begin = self.loop.now
        has_tiers = world.tiers is not None
        prefixes = [[rng.randrange(1, 100) for _ in range(40 if has_tiers else 20)] for _ in range(2 + has_tiers)]
        plans = [
            make_plan(rng, number, rng.random() * FAULT_SECONDS, world.num_apps, prefixes)
            for number in range(rng.randint(2, 9) + MORE_REQUESTS * has_tiers)
        ]
        requests = [SimulatedRequest(self, plan) for plan in plans if len(plan.prompt) < world.context]
        tasks = [self.loop.create_task(request.run()) for request in requests]
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            self.had_faults = True
            self.loop.call_later(rng.random() * FAULT_SECONDS, self._break, rng.choice(FAULTS))
        stops_early = rng.random() < 0.05
        if stops_early:
            self.had_faults = True
            await asyncio.sleep(rng.random() * FAULT_SECONDS)
            await self._close()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=RECOVERY)
            assert not late, "requests have no end"
        for request, task in zip(requests, tasks, strict=True):
            task.result()
            assert request.outcome is not None
        if not stops_early:
            await asyncio.sleep(max(0.0, begin + FAULT_SECONDS - self.loop.now) + SETTLED)
            if self._nights:
                _, late = await asyncio.wait(self._nights, timeout=RECOVERY)
                assert not late, "a night has no end"
            await self._serve_once_more(prefixes[0])
            await self._close()
        assert not self.wire.open, "sockets are left open"
        assert not self.loop.num_readers
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}"

    async def _serve_once_more(self, prompt: list[int]) -> None:
        """After all faults the server serves again, and has forgotten the requests before."""
        world = self.world
        for engine in self.supervisor.engines:
            engine.hangs = engine.fails = False  # it had no work that could have shown it, or not for long
            engine.wake_up()
        await asyncio.sleep(AFTERMATH)
        end = self.loop.now + RECOVERY
        while self._is_stopped() or not all(one.health()[0] for one in self.clients):
            assert self.loop.now < end, f"the server does not recover: {self.supervisor.reason}"
            await asyncio.sleep(0.5)
        assert self.supervisor.state is EngineState.READY
        # What was sent to an engine just before it died may have reached it.
        for number, _ in enumerate(self.clients):
            plan = Plan(
                1000 + number, 0.0, number, prompt[: world.context - 1], 5, 1, (), 0, "", False, None, False, None
            )
            request = SimulatedRequest(self, plan)
            await asyncio.wait_for(request.run(), RECOVERY)
            if expected_answer(plan, world)[1] != "error":
                assert request.outcome == "completed", (request.outcome, request.error)
        await asyncio.sleep(SETTLED)
        core = self.supervisor.engines[-1].core
        assert core is not None
        check_quiet(core)
        for one in self.clients:
            assert not one._inboxes, "a request's inbox is kept"

    def _is_stopped(self) -> bool:
        """By a signal, which may not show yet."""
        engine = self.supervisor.engine
        return engine is None or engine.is_stopped

    async def _sleep_and_wake_up(self) -> None:
        """As the pool does: a model that cannot sleep, or wake up, has its engine ended and started again."""
        supervisor = self.supervisor
        slept = await supervisor.sleep(self.rng.random() * 4)
        self.note("asleep", slept)
        try:
            if slept:
                await asyncio.sleep(self.rng.random() * 2)
                await asyncio.wait_for(supervisor.wake_up(), SLEEP_TIMEOUT)
                return
        except (EngineStartError, asyncio.TimeoutError) as error:
            self.note("does not wake up", type(error).__name__)
        for _ in range(MOST_STARTS):
            await self.supervisor.stop()
            self.supervisor = SimulatedSupervisor(self)
            self.supervisor.start()
            with contextlib.suppress(EngineStartError):
                await self.supervisor.wait_started()
                return

    async def _close(self) -> None:
        for night in self._nights:
            night.cancel()
        await asyncio.gather(*self._nights, return_exceptions=True)
        for one in self.clients:
            await one.close()
        await self.supervisor.stop()

    def _break(self, fault: str) -> None:
        engine = self.supervisor.engine
        self.note("fault", fault)
        if fault == "no descriptors":
            self.wire.has_descriptors = False
            self.loop.call_later(self.rng.random() * 5, self._give_descriptors)
            if self.rng.random() < 0.5 and engine is not None:
                engine.exit(-9)
        elif fault == "night":
            if not self._nights and self.supervisor.state is EngineState.READY:
                self._nights.add(self.loop.create_task(self._sleep_and_wake_up()))
        elif fault == "bad starts":
            self._bad_starts = self.rng.randint(1, 3)
            if engine is not None:
                engine.exit(-11)
        elif fault == "reset":
            for one in self.clients:
                if one.health()[0]:
                    one.reset_prefix_cache(self.rng.choice((None, [0])) if self.world.tiers is not None else None)
        elif engine is None:
            return
        elif fault == "kill":
            engine.exit(-9)
        elif fault in ("stop", "stop for long"):
            engine.stop()
            self.loop.call_later(self.rng.random() * (4 if fault == "stop" else 40), engine.go_on)
        elif fault == "hang":
            engine.hangs = True
        elif fault == "exception":
            engine.fails = True

    def _give_descriptors(self) -> None:
        self.wire.has_descriptors = True


@contextlib.contextmanager
def simulated_modules(history: History) -> Iterator[None]:
    """Let the code under test see the simulated sockets and the virtual clock."""
    now = history.loop.time
    clock = SimpleNamespace(monotonic=now, perf_counter=now, thread_time=now, time=now)
    wire = history.wire
    drafts = history.world.drafts
    replaced: list[tuple[Any, str, Any]] = []
    for module, names in (
        (client, {"Connection": wire.connection, "time": clock}),
        (connection, {"Connection": wire.connection}),
        (heartbeat, {"time": clock}),
        (pass_queue, {"time": clock}),
        (engine_process, {"Listener": wire.listener, "time": clock, "HeartbeatSender": functools.partial(Heart, wire)}),
        (supervisor, {"send_once": wire.send_once, "time": clock}),
        (generation, {"time": clock}),
        (suffixes, {"MAX_AT_ONCE": drafts.most_indexed} if drafts is not None else {}),
    ):
        for name, value in names.items():
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, value)
    gc.disable()  # so that what is collected, and when, does not depend on what ran before
    try:
        yield
    finally:
        gc.enable()
        for module, name, value in replaced:
            setattr(module, name, value)
