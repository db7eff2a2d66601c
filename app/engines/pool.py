"""The engine processes of all models: loaded on demand, unloaded when idle or when another needs the room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tessera.app.engines.engine_group import EngineGroup
from tessera.app.engines.messages import (
    Done,
    EngineLaunch,
    GoOn,
    Granted,
    Hold,
    KeepAlive,
    MakeWay,
    ModelStatus,
    Refused,
    Release,
    Sleep,
    State,
    Statuses,
    ToPool,
    Used,
    Wake,
    Yield,
    Yielded,
    pool_address,
)
from tessera.app.engines.pooled_model import Link, PooledModel
from tessera.app.engines.turns import Turns, Waiting, is_turn_over, making_way
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, TesseraError
from tessera.engine.contract.messages import EngineInfo, LoadProgress
from tessera.engine.ipc.supervisor import EngineStartError, EngineSupervisor

logger = logging.getLogger("tessera.models")

LOOK_INTERVAL = 0.5  # seconds between two looks for idle models
STOP_TIMEOUT = 5.0  # seconds, of an engine without requests
SLEEP_TIMEOUT = 60.0  # seconds, of the same to fall asleep or wake up: locking host memory takes seconds
RETRY_DELAY = 30.0  # seconds after a failed load in which requests are refused at once
YIELD_TIMEOUT = 1.0  # seconds for the app processes to release what they do not use
MAX_LINE = 2**16
SHARE_MARGIN = 1e-6  # sums of shares are sums of floats
AWAY: tuple[State, ...] = ("unloaded", "asleep")


class LoadError(TesseraError):
    """A model that cannot be loaded now; `code` is for the client's error."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class EnginePool:
    """Keeps engines within a share of the device.

    Args:
        run_dir: from `make_run_dir`; removed by `stop`.
        budget: most that the shares of the loaded models may add up to.
        patience: seconds that a model waits for others to become idle where there is no room.
        host_bytes: most host memory that engines take to sleep, rather than to be ended.
        module, step_timeout: see `EngineSupervisor`.
        on_progress: called with the progress of loading.
    """

    def __init__(
        self,
        run_dir: Path,
        launches: Sequence[EngineLaunch],
        *,
        budget: float = 1.0,
        patience: float = 60.0,
        host_bytes: int = 0,
        module: str = "tessera.engine.ipc.process",
        step_timeout: float | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._models = [
            PooledModel(index, launch, math.inf if launch.keep_alive is None else launch.keep_alive)
            for index, launch in enumerate(launches)
        ]
        self._budget = budget + SHARE_MARGIN
        self._patience = patience
        self._host_bytes = host_bytes
        self._module = module
        self._step_timeout = step_timeout
        self._on_progress = on_progress
        self._links: set[Link] = set()
        self._changed = asyncio.Event()
        self._one_load = asyncio.Lock()
        self._turns = Turns()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None
        self._looking: asyncio.Task[None] | None = None
        self._preloads: list[tuple[PooledModel, asyncio.Task[EngineInfo]]] = []
        self._launched = asyncio.Event()

    def start(self) -> None:
        """Begin to load the models that are preloaded; returns at once. See `wait_started`."""
        preloaded = (model for model in self._models if model.launch.preload)
        self._preloads = [(model, self._begin_load(model)) for model in preloaded]

    async def listen(self) -> None:
        """Take links of app processes."""
        self._server = await asyncio.start_unix_server(self._serve_link, pool_address(self._run_dir), limit=MAX_LINE)
        self._looking = asyncio.create_task(self._look_for_idle())

    async def wait_launched(self) -> None:
        """Return when the first preloaded model's processes run, or could not be made."""
        if self._preloads:
            await self._launched.wait()

    async def wait_started(self) -> dict[str, EngineInfo]:
        """Wait for the models that are preloaded; -> their facts by name.

        Raises:
            ConfigError: an engine refused its options or the model.
            EngineStartError: the only model's engine failed repeatedly. Another's is left out, with a line in the log.
        """
        found = {}
        for model, loading in self._preloads:
            try:
                found[model.name] = await asyncio.shield(loading)
            except ConfigError as error:
                raise ConfigError(f"{model.name}: {error}" if len(self._models) > 1 else str(error)) from None
            except EngineStartError:
                if len(self._models) == 1:
                    raise
        return found

    async def stop(self, timeout: float) -> None:
        """End all engines; those with requests have `timeout` seconds to finish."""
        for task in (self._looking, *self._tasks, *(model.loading for model in self._models)):
            if task is not None:
                task.cancel()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(self._end(model, timeout, "unloaded") for model in self._models))
        shutil.rmtree(self._run_dir, ignore_errors=True)

    # -- links ----------------------------------------------------------------------------------

    async def _serve_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(writer)
        decoder: msgspec.json.Decoder[ToPool] = msgspec.json.Decoder(ToPool)
        self._links.add(link)
        link.send(self._statuses())
        try:
            while line := await reader.readline():
                self._handle(link, decoder.decode(line))
        except (OSError, ValueError, msgspec.DecodeError):
            logger.debug("an app process's link broke", exc_info=True)
        finally:
            self._links.discard(link)
            link.yielded.set()
            for model in self._models:
                self._release(link, model, time.monotonic())
            writer.close()

    def _handle(self, link: Link, message: ToPool) -> None:
        if isinstance(message, Yielded):
            link.yielded.set()
            return
        model = self._models[message.model]
        match message:
            case Hold():
                model.num_asking += 1
                self._spawn(self._grant(link, model))
            case Used():
                model.accounts.add(message.account)
            case Release():
                self._release(link, model, message.used_at)
            case KeepAlive():
                model.keep_alive = message.limit
                self._tell()
            case Sleep():
                self._spawn(self._sleep(link, model, message.token, keep=message.keep))
            case Wake():
                self._spawn(self._wake(link, model, message.token))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _grant(self, link: Link, model: PooledModel) -> None:
        try:
            await self._ensure_loaded(model)
            while model.makes_way:
                await self._changed.wait()
                await self._ensure_loaded(model)
        except LoadError as error:
            link.send(Refused(model.index, str(error), error.code))
            return
        finally:
            model.num_asking -= 1
        if link in self._links:
            model.holds.add(link)
            model.idle_since = None
            link.send(Granted(model.index))

    def _release(self, link: Link, model: PooledModel, used_at: float) -> None:
        if link in model.holds:
            model.holds.discard(link)
            model.used_at = max(model.used_at, used_at)
            self._notify()

    async def _sleep(self, link: Link, model: PooledModel, token: int, *, keep: bool) -> None:
        if model.loading is not None:
            await asyncio.wait({model.loading})
        was_up = model.state == "loaded"
        if model.state != "asleep":
            self._set_state(model, "asleep")
        if not keep:
            await self._end(model, self._patience, "asleep")
        elif was_up:
            await self._put_away(model, self._patience, "asleep")
        while model.group is not None and not model.is_kept:  # it still ends, or falls asleep
            await self._changed.wait()
        link.send(Done(token))

    async def _wake(self, link: Link, model: PooledModel, token: int) -> None:
        if model.state in ("asleep", "failed"):
            self._set_state(model, "unloaded")
            model.failed_at = -math.inf
        try:
            await self._ensure_loaded(model)
        except LoadError as error:
            link.send(Done(token, str(error)))
        else:
            link.send(Done(token))

    def _statuses(self) -> Statuses:
        now, wall = time.monotonic(), time.time()
        found = []
        for model in self._models:
            expires = 0.0
            if model.state == "loaded" and model.keep_alive < math.inf:
                expires = wall + model.keep_alive - (now - (model.idle_since or now))
            counts = (model.num_loads, model.num_wakes, model.host_bytes)
            found.append(ModelStatus(model.state, expires, *counts, model.is_kept and model.state in AWAY))
        return Statuses(found)

    def _tell(self) -> None:
        statuses = self._statuses()
        for link in self._links:
            link.send(statuses)

    def _set_state(self, model: PooledModel, state: State) -> None:
        model.state = state
        model.makes_way = model.makes_way and state == "loaded"
        self._tell()
        self._notify()

    def _notify(self) -> None:
        """Wake the loads that wait for room."""
        self._changed.set()
        self._changed = asyncio.Event()

    # -- loading and unloading ------------------------------------------------------------------

    async def _ensure_loaded(self, model: PooledModel) -> None:
        """Raises LoadError."""
        if model.state == "asleep":
            raise LoadError(f"The model {model.name!r} is asleep until POST /wake_up.", "model_asleep")
        if model.state == "loaded":
            return
        if model.state == "failed":
            wait = model.failed_at + RETRY_DELAY - time.monotonic()
            if wait > 0:
                raise LoadError(
                    f"The model {model.name!r} could not be loaded, as the server's log says; "
                    f"it is tried again in {wait:.0f} s.",
                    "model_load_failed",
                )
        loading = model.loading if model.loading is not None else self._begin_load(model)
        try:
            await asyncio.shield(loading)
        except LoadError:
            raise
        except TesseraError:
            raise LoadError(
                f"The model {model.name!r} could not be loaded, as the server's log says.", "model_load_failed"
            ) from None

    def _begin_load(self, model: PooledModel) -> asyncio.Task[EngineInfo]:
        model.loading = asyncio.ensure_future(self._load(model))
        model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return model.loading

    async def _load(self, model: PooledModel) -> EngineInfo:
        """Make room, and start the engine. Raises LoadError, ConfigError or EngineStartError."""
        try:
            while model.group is not None and not model.is_kept:  # it still ends
                await self._changed.wait()
            await self._make_room(model)
            # One after the other: each measures the device's memory before it takes its own.
            async with self._one_load:
                info = await self._wake_engine(model)
                return await self._start_engine(model) if info is None else info
        finally:
            model.loading = None
            self._launched.set()

    async def _wake_engine(self, model: PooledModel) -> EngineInfo | None:
        """None if the model is not in host memory any more."""
        group = model.group
        if group is None or not model.is_kept:
            return None
        began = time.monotonic()
        try:
            info = await asyncio.wait_for(group.wake_up(), SLEEP_TIMEOUT)
        except (EngineStartError, asyncio.TimeoutError) as error:
            reason = str(error) or f"it was not awake within {SLEEP_TIMEOUT:.0f} s"
            logger.warning("the model %s is read again, as it could not be woken: %s", model.name, reason)
            await self._end_kept(model)
            return None
        model.is_kept = False
        model.num_wakes += 1
        model.used_at = model.idle_since = model.turn_began = time.monotonic()
        logger.info("the model %s is awake, in %.2f s", model.name, time.monotonic() - began)
        self._set_state(model, "loaded")
        return info

    async def _start_engine(self, model: PooledModel) -> EngineInfo:
        began = time.monotonic()
        try:
            group = model.group = EngineGroup(model.launch, self._run_dir, model.index, self._supervise)
            group.start()
            await group.wait_launched()
            self._launched.set()
            info = await group.wait_started()
        except TesseraError as error:
            if len(self._models) > 1:
                logger.error("the model %s could not be loaded: %s", model.name, error)
            model.failed_at = time.monotonic()
            await self._end(model, STOP_TIMEOUT, "failed")
            raise
        model.num_loads += 1
        model.sleep_bytes = None if info.sleep_bytes is None else info.sleep_bytes * model.launch.num_engines
        model.used_at = model.idle_since = model.turn_began = time.monotonic()
        if len(self._models) > 1:
            logger.info("the model %s is loaded, in %.1f s", model.name, time.monotonic() - began)
        self._set_state(model, "loaded")
        return info

    def _supervise(
        self, number: int, config: EngineConfig, folder: Path, environment: dict[str, str]
    ) -> EngineSupervisor:
        return EngineSupervisor(
            config,
            folder,
            owner_dir=self._run_dir,
            module=self._module,
            on_progress=self._on_progress if number == 0 else None,  # the others load the same
            step_timeout=self._step_timeout,
            environment=environment,
        )

    async def _make_room(self, model: PooledModel) -> None:
        """Reserve the model's share, for which the longest unused idle models are unloaded, and others in turn.

        Raises:
            LoadError: the others have been in use all the time, and their turns do not end for this one's account.
        """
        waiting = self._turns.join(model, time.monotonic())
        try:
            await self._wait_for_room(waiting)
            self._turns.take(waiting)
            self._set_state(model, "loading")
        finally:
            self._turns.leave(waiting)
            self._let_go_on()

    async def _wait_for_room(self, waiting: Waiting) -> None:
        model = waiting.model
        while not self._fits(model):
            await self._release_all_unused()
            idle = [other for other in self._models if other.is_idle]
            if idle:
                unused = min(idle, key=lambda other: other.used_at)
                self._begin_unload(unused, f"makes room for {model.name}")
                await self._put_away(unused, SLEEP_TIMEOUT, "unloaded")
                continue
            has_turn = self._have_others_make_way(waiting)
            if not has_turn and time.monotonic() >= waiting.since + self._patience:
                used = ", ".join(other.name for other in self._models if other.takes_room)
                raise LoadError(
                    f"There is no room for the model {model.name!r}: {used} are in use; please try again later.",
                    "no_room_for_model",
                )
            changed = self._changed
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), LOOK_INTERVAL)  # an engine's work ends without a word

    def _have_others_make_way(self, waiting: Waiting) -> bool:
        """Whether the model comes to a turn; if it is the next, and the others' are over, they make way from now on."""
        leaving = making_way(waiting.model, self._models, self._budget)
        if leaving and self._turns.first(self._models, self._budget) is waiting:
            now = time.monotonic()
            staying = [other for other in leaving if not other.is_leaving]
            if all(is_turn_over(other, now) for other in staying):
                waiting.is_next = True
                for other in staying:
                    self._begin_making_way(other, waiting.model)
        return leaving is not None

    def _begin_making_way(self, model: PooledModel, other: PooledModel) -> None:
        if not model.makes_way:
            logger.info("the turn of the model %s is over: it makes way for %s", model.name, other.name)
            model.makes_way = True
            for link in model.holds:
                link.send(MakeWay(model.index))

    def _let_go_on(self) -> None:
        """Models that make way, and need not any more."""
        first = self._turns.first(self._models, self._budget)
        leaving = making_way(first.model, self._models, self._budget) if first is not None else None
        for model in self._models:
            if model.makes_way and model not in (leaving or ()):
                model.makes_way = False
                for link in model.holds:
                    link.send(GoOn(model.index))
        self._notify()

    async def _release_all_unused(self) -> None:
        """Have the app processes release what they hold for the requests that may follow."""
        links = list(self._links)
        for link in links:
            link.yielded.clear()
            link.send(Yield())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(link.yielded.wait() for link in links)), YIELD_TIMEOUT)

    def _fits(self, model: PooledModel) -> bool:
        taken = sum(other.share for other in self._models if other is not model and other.takes_room)
        if taken + model.share > self._budget:
            return False
        return not self._turns.is_before(model, self._models, self._budget, time.monotonic())

    def _begin_unload(self, model: PooledModel, why: str) -> None:
        """At once, so that no request takes the model meanwhile."""
        logger.info("the model %s is unloaded: it %s", model.name, why)
        self._set_state(model, "unloading")

    async def _put_away(self, model: PooledModel, timeout: float, state: State) -> None:
        """Have the model sleep where host memory has room for its weights, else end its engine."""
        if not await self._make_host_room(model) or model.group is None:
            await self._end(model, min(timeout, STOP_TIMEOUT) if state == "unloaded" else timeout, state)
            return
        assert model.sleep_bytes is not None
        model.host_bytes = model.sleep_bytes
        if not await model.group.sleep(timeout):
            logger.warning("the model %s is ended, as it could not sleep", model.name)
            await self._end(model, STOP_TIMEOUT, state)
            return
        model.is_kept = True
        self._set_state(model, "asleep" if model.state == "asleep" else state)

    async def _make_host_room(self, model: PooledModel) -> bool:
        """Whether the model may take host memory to sleep, for which the longest unused of those there are ended."""
        needed = model.sleep_bytes
        if needed is None or needed > self._host_bytes:
            return False
        while sum(other.host_bytes for other in self._models if other is not model) + needed > self._host_bytes:
            kept = [other for other in self._models if other.is_kept and other.loading is None and other is not model]
            if not kept:
                return False
            unused = min(kept, key=lambda other: (other.state == "asleep", other.used_at))
            logger.info("the model %s leaves host memory: it makes room for %s", unused.name, model.name)
            await self._end_kept(unused)
        return True

    async def _end_kept(self, model: PooledModel) -> None:
        """End an engine that sleeps; the model's state stays."""
        group, model.is_kept = model.group, False
        if group is not None:
            await group.stop(STOP_TIMEOUT)
        model.group, model.host_bytes = None, 0
        self._tell()
        self._notify()

    async def _end(self, model: PooledModel, timeout: float, state: State) -> None:
        model.is_kept = False
        if model.group is not None:
            await model.group.stop(timeout)
            model.group = None
        model.host_bytes = 0
        self._set_state(model, "asleep" if model.state == "asleep" else state)

    async def _look_for_idle(self) -> None:
        """Unload what has been idle for as long as it is kept."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            now = time.monotonic()
            for model in self._models:
                if model.is_unused:
                    model.accounts.clear()
                if not model.is_idle:
                    model.idle_since = None
                    continue
                model.turn_began = now
                if model.idle_since is None:
                    model.idle_since = now
                    self._tell()
                elif now - model.idle_since >= model.keep_alive:
                    self._begin_unload(model, f"was idle for {now - model.idle_since:.0f} s")
                    self._spawn(self._put_away(model, SLEEP_TIMEOUT, "unloaded"))
