"""Simulated processes: the real engine process and supervisor, over a runner that hashes, on virtual time."""

from __future__ import annotations

import asyncio
import errno
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import DeviceError, OutOfMemoryError
from tessera.engine.contract.messages import (
    EngineInfo,
    EngineReport,
    Heartbeat,
    Ready,
    RequestOutput,
    StartFailed,
    heartbeat_address,
    request_address,
)
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import StepBatch, StepResult, TokenMask
from tessera.engine.ipc.adapter_loads import AdapterLoads
from tessera.engine.ipc.engine_process import EngineProcess
from tessera.engine.ipc.heartbeat import INTERVAL
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tessera.engine.ipc.supervisor import EngineSupervisor
from tessera.engine.kv_tiers.tiers import WAIT_SECONDS
from tests.simulation.invariants import check_core
from tests.simulation.wire import Wire
from tests.support.fakes.fake_runner import Done, FakeRunner, fake_limits

if TYPE_CHECKING:
    from tests.simulation.history import History

RUN_DIR = "/simulated"
VOCAB_SIZE, EOS = 100, 0
STEP_TIMEOUT = 5.0  # seconds
MAX_IDLE_TURNS = 3  # one step ahead, the first gives nothing yet; an abort or a reset may leave nothing to do
MAX_LOADING_TURNS = 80  # until late copies and files have come
SHORT_OF_MEMORY = 0.15  # of the times
SIGKILL, SIGTERM = -9, -15


def extend(state: int, token_ids: Iterable[int]) -> int:
    """The hash of a context with these tokens appended."""
    return zlib.crc32(bytes(list(token_ids)), state)


def token_after(state: int) -> int:
    """The model's token after a context with this hash; -1 for logits that are not finite."""
    return -1 if state % 401 == 7 else state % VOCAB_SIZE


def hashed_token(context: Sequence[int]) -> int:
    return token_after(extend(0, context))


def echoed_token(context: Sequence[int]) -> int:
    """Of a model that mostly repeats itself."""
    state = extend(0, context)
    if state % 401 == 7 or state % 10 == 0:
        return token_after(state)
    return extend(0, (context[-1] % 5, len(context) // 9)) % 12 + 1


class HashingRunner:
    """Its next token is a hash of the context, which it keeps by slot."""

    full_sizes: tuple[int, ...] = ()
    num_awaited_graphs = 0

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._states: dict[int, int] = {}

    def start(self, batch: StepBatch) -> Done:
        states = self._states
        for init in batch.slot_inits:
            states[init.slot] = extend(extend(0, init.prompt_token_ids), init.output_token_ids)
        token_ids = []
        for slot in batch.sampling.slots.tolist():
            token_id = token_after(states[slot])
            token_ids.append(token_id)
            if token_id >= 0:
                states[slot] = extend(states[slot], (token_id,))
        return Done(StepResult(np.array(token_ids, np.int32)))

    def sample(self, running: Done, mask: TokenMask | None) -> None:
        raise AssertionError("nothing is constrained here")


class RememberingRunner(FakeRunner):
    """Its next token follows from what it reads in its KV cache, so that a block in the wrong place changes tokens."""

    def __init__(
        self, num_blocks: int, block_size: int, say: Callable[[Sequence[int]], int], *, asynchronous: bool
    ) -> None:
        super().__init__(num_blocks, block_size, asynchronous=asynchronous)
        self.say = lambda context: say(context.tolist()) if context.min() >= 0 else -1


class SimulatedSleeper:
    """Loses the KV cache; memory may be short, in the evening or in the morning."""

    def __init__(self, history: History, core: EngineCore, runner: HashingRunner | RememberingRunner) -> None:
        self._rng = history.rng
        self._core = core
        self._runner = runner

    def sleep(self) -> None:
        if self._rng.random() < SHORT_OF_MEMORY:
            raise MemoryError("no memory can be locked")
        self._core.drop_kv_cache()
        assert self._core.block_manager.num_used_blocks == 0
        if isinstance(self._runner, RememberingRunner):
            self._runner.lose_memory()

    def wake_up(self) -> None:
        if self._rng.random() < SHORT_OF_MEMORY:
            raise OutOfMemoryError("another model has it")


class NoMetrics:
    """In place of the metrics' thread."""

    def take(self) -> list[Any]:
        return []

    def ask(self, client: bytes, token: int) -> None:
        pass


class Heart:
    """In place of the heartbeats' thread: beats as long as its process lives and is not stopped."""

    def __init__(self, wire: Wire, run_dir: str, make_heartbeat: Any, lifeline_fd: int, on_orphaned: Any) -> None:
        self._make_heartbeat = make_heartbeat
        self._listener = wire.listener(heartbeat_address(run_dir))

    def start(self) -> None:
        pass

    def beat(self, encode: Any) -> None:
        heartbeat: Heartbeat = self._make_heartbeat()
        self._listener.send_to_all(encode(heartbeat))


class SimulatedEngine:
    """One engine process, from its start to its end; `exit_code` is None as long as it lives."""

    def __init__(self, history: History) -> None:
        self._history = history
        history.engines.append(self)
        self._loop = history.loop
        self.exit_code: int | None = None
        self.is_stopped = False
        self.reports: asyncio.Queue[EngineReport | None] = asyncio.Queue()
        self.core: EngineCore | None = None
        self.engine: LoadedEngine | None = None
        self.hangs = self.fails = False
        self._finished: set[tuple[bytes, str]] = set()
        self._turn_is_due = False
        self._idle_turns = self._loading_turns = 0
        self.process = EngineProcess(RUN_DIR, RUN_DIR, self.reports.put_nowait)
        self.process._metrics = NoMetrics()  # type: ignore[assignment]
        self._send_outputs = self.process._send_outputs
        self.process._send_outputs = self._check_outputs  # type: ignore[method-assign]
        self._heart: Heart = self.process._heartbeat  # type: ignore[assignment]
        self._beat()
        self._loop.call_later(history.rng.choice((0.05, 0.5, 3.0)), self._load)

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def exit(self, code: int) -> None:
        if self.is_alive:
            self._history.note("engine ends", code)
            self.exit_code = code
            self._history.wire.kill(request_address(RUN_DIR))
            self._history.wire.kill(heartbeat_address(RUN_DIR))
            self.reports.put_nowait(None)

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        if self.is_alive and self.is_stopped:
            self.is_stopped = False
            self._beat()
            self.wake_up()

    def terminate(self) -> None:
        if self.engine is None:
            self.exit(SIGTERM)
        else:
            self.process._draining = True
            self.wake_up()

    def _beat(self) -> None:
        if self.is_alive and not self.is_stopped:
            self._heart.beat(self.process._encoder.encode)
            self._loop.call_later(INTERVAL, self._beat)

    def _load(self) -> None:
        history = self._history
        if not self.is_alive:
            return
        if self.is_stopped:
            self._loop.call_later(1.0, self._load)
            return
        if history.fails_to_start():
            self.reports.put_nowait(StartFailed("no memory", user_error=False))
            self.exit(1)
            return
        world = history.world
        runner: HashingRunner | RememberingRunner = HashingRunner(asynchronous=world.asynchronous)
        tiers = None
        if world.tiers is not None or world.config.speculation != "off":
            blocks = world.num_blocks, world.config.block_size
            runner = RememberingRunner(*blocks, world.say, asynchronous=world.asynchronous)
            runner.num_slots = world.config.max_num_seqs
            if world.tiers is not None:
                tiers = world.tiers.make(history.rng, runner, self._loop.time)
        limits = None
        settings = world.config.speculation_settings
        if world.drafts is not None and settings is not None and settings.uses_model:
            limits = fake_limits(settings.method, settings.num_tokens, world.drafts.longest_text)
            assert isinstance(runner, RememberingRunner)
            runner.drafts.num_right = world.drafts.num_right
            runner.drafts.shift, runner.drafts.rereads = limits.shift, limits.rereads
        self.core = EngineCore(
            world.config,
            runner,
            vocab_size=VOCAB_SIZE,
            max_model_len=world.max_model_len,
            num_kv_blocks=world.num_blocks,
            eos_token_ids=(EOS,),
            clock=self._loop.time,
            tiers=tiers,
            draft_limits=limits,
        )
        sleeper = SimulatedSleeper(history, self.core, runner)
        self.engine = self.process._engine = LoadedEngine(self.core, world.info, lambda: b"", sleeper=sleeper)
        self.process._adapters = AdapterLoads(None, "", self.wake_up, allowed=False)
        self.reports.put_nowait(Ready(self.process.epoch, world.info))
        listener: Any = self.process._listener
        listener.on_arrival = self.wake_up
        self.wake_up()

    def wake_up(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One turn of `EngineProcess.run`, which waits for nothing here."""
        self._turn_is_due = False
        if not self.is_alive or self.is_stopped or self.engine is None or self.core is None:
            return
        process, core = self.process, self.core
        had_work, num_steps = core.has_work, core.num_steps
        if self.hangs and had_work:
            return  # heartbeats go on, steps do not
        if self.fails and had_work:
            self.exit(1)
            return
        process._take_turn(self.engine)
        process._has_work = core.has_work
        process._refresh_stats(core)
        check_core(core)
        self._history.note("turn", core.num_steps, len(core.scheduler.running), len(core.scheduler.waiting))
        waits = core.num_steps == num_steps and bool(core.scheduler.loading)
        self._loading_turns = self._loading_turns + 1 if waits else 0
        assert self._loading_turns <= MAX_LOADING_TURNS, "a load has no end"
        if core.num_steps > num_steps or waits:
            self._idle_turns = 0
        elif had_work:
            self._idle_turns += 1
            assert self._idle_turns <= MAX_IDLE_TURNS, "turns without progress"
        elif not core.has_work and core.block_manager.tiers is not None:
            core.block_manager.tiers.poll()
        order = process._order
        if order is not None and not core.has_work and not process._draining:
            try:
                process._carry_out(order, self.engine.sleeper)
            except DeviceError:
                self.exit(1)
                return
            check_core(core)
            self._history.note("carried out", type(order).__name__, process._is_asleep)
        if core.has_work:
            self._turn_is_due = True
            self._loop.call_later(WAIT_SECONDS if waits else self._history.step_seconds(), self._turn)
        elif process._draining:
            self.exit(0)

    def _check_outputs(self, core: Any, client: bytes, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert (client, output.request_id) not in self._finished, "an output after the last"
            if output.finish_reason is not None:
                self._finished.add((client, output.request_id))
        self._send_outputs(core, client, outputs)


class Stdin:
    def write(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class SimulatedPopen:
    """In place of `subprocess.Popen`."""

    def __init__(self, engine: SimulatedEngine, pid: int) -> None:
        self._engine = engine
        self.pid = pid
        self.stdin = Stdin()

    def poll(self) -> int | None:
        return self._engine.exit_code

    def kill(self) -> None:
        self._engine.exit(SIGKILL)

    def terminate(self) -> None:
        self._engine.terminate()


class SimulatedSupervisor(EngineSupervisor):
    """The supervisor, which starts simulated processes."""

    def __init__(self, history: History) -> None:
        super().__init__(history.world.config, history.run_dir, step_timeout=STEP_TIMEOUT)
        self._history = history
        self.engines: list[SimulatedEngine] = []

    @property
    def engine(self) -> SimulatedEngine | None:
        return self.engines[-1] if self.engines and self.engines[-1].is_alive else None

    def _launch(self) -> Any:
        if not self._history.wire.has_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        assert self.engine is None, "two engines at a time"
        self.engines.append(SimulatedEngine(self._history))
        self._history.note("engine starts", len(self.engines))
        return SimulatedPopen(self.engines[-1], len(self.engines)), len(self.engines) - 1

    async def _follow_reports(self, report_fd: int) -> None:
        while (report := await self.engines[report_fd].reports.get()) is not None:
            self._handle(report)


def engine_info(config: EngineConfig, max_model_len: int, num_blocks: int) -> EngineInfo:
    return EngineInfo(
        device="cpu",
        device_name="simulated",
        device_reason="asked for",
        dtype="float32",
        architecture="Simulated",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_kv_blocks=num_blocks,
        kv_cache_bytes=0,
        weight_bytes=0,
        num_parameters=1,
        eos_token_ids=(EOS,),
        load_seconds=0.0,
    )
