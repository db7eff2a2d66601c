"""The engines as one app process sees them: a client of each, and the link to the pool that loads them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tessera.app.engines.messages import (
    Done,
    FromPool,
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
    engine_dir,
    pool_address,
)
from tessera.app.engines.model_client import ModelClient
from tessera.app.engines.replicated_client import ReplicatedClient
from tessera.engine.contract.errors import EngineUnavailableError, QueueFullError
from tessera.engine.ipc.client import EngineClient

logger = logging.getLogger("tessera.app")

LINGER = 1.0  # seconds for which a model is held after its last request, so that the next need not ask
CONNECT_POLL, READY_POLL = 0.05, 0.01  # seconds
READY_PATIENCE = 5.0  # seconds; beyond it the engine itself refuses requests, with its reason
MAX_WAITING = 1024  # requests of one app process that wait for one model
MAX_ACCOUNTS = 1024  # of which the pool is told while a model is held or asked for
UNUSED: tuple[State, ...] = ("unloaded", "unloading", "asleep")


class Engine:
    """One model's engine.

    Attributes:
        name: of the model, for errors.
        client: of its engine process, whether that runs or not, or of all of them.
        on_demand: it comes and goes, so that it is not at fault while it is being loaded.
    """

    def __init__(self, index: int, name: str, client: ModelClient, *, on_demand: bool = False) -> None:
        self.index = index
        self.name = name
        self.client = client
        self.on_demand = on_demand
        self.status = ModelStatus("loaded")
        self._num_uses = 0
        self._waiting: Counter[int] = Counter()  # of these, by account, for the pool's answer
        self._is_held = False
        self._makes_way = False  # it is held until what runs has ended, and asked for again then
        self._accounts: set[int] = set()  # that the pool knows of
        self._used_at = 0.0
        self._answer: asyncio.Future[None] | None = None

    @property
    def members(self) -> tuple[ModelClient, ...]:
        """The clients of each of its engine processes."""
        return self.client.members if isinstance(self.client, ReplicatedClient) else (self.client,)

    @property
    def is_resident(self) -> bool:
        """It should be up: one that is loaded on demand, or sleeps, need not be."""
        return self.status.state not in UNUSED and not (self.on_demand and self.status.state == "loading")

    @property
    def _is_used(self) -> bool:
        """By requests that do not just wait for it."""
        return self._num_uses > self._waiting.total()

    def health(self) -> tuple[bool, str]:
        """As the client's; an engine that need not be up is well."""
        state = self.status.state
        if not self.is_resident:
            where = ", its weights are in host memory" if self.status.in_host_memory else ""
            return True, f"the model is {'being loaded' if state == 'loading' else state}{where}"
        if state == "failed":
            return False, "the model could not be loaded"
        return self.client.health()


class Engines:
    """All engines of a server, in the order of its models.

    Args:
        run_dir: of the pool; None: the engines are always there, as in tests.
        is_static: the one model is loaded at the start and stays, so that requests need not hold it.
    """

    def __init__(self, engines: Sequence[Engine], run_dir: str | Path | None, *, is_static: bool) -> None:
        self._engines = tuple(engines)
        self._run_dir = run_dir
        self.is_static = is_static
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tokens = itertools.count()
        self._orders: dict[int, asyncio.Future[None]] = {}

    @classmethod
    def of_run_dir(cls, run_dir: str | Path, names: Mapping[str, int], *, is_static: bool) -> Engines:
        """Those of a pool in `run_dir`; `names` are of the models, each with the number of its engine processes."""
        made = [
            Engine(index, name, _client_of(run_dir, index, num_engines), on_demand=not is_static)
            for index, (name, num_engines) in enumerate(names.items())
        ]
        for engine in made:
            engine.status = ModelStatus("loading" if is_static else "unloaded")
        return cls(made, run_dir, is_static=is_static)

    @classmethod
    def of_clients(cls, *clients: EngineClient) -> Engines:
        """Engines that are there already and stay."""
        return cls([Engine(index, "", client) for index, client in enumerate(clients)], None, is_static=True)

    def __iter__(self) -> itertools.chain[Engine]:
        return itertools.chain(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, index: int) -> Engine:
        return self._engines[index]

    async def start(self) -> None:
        """Connect, in the running event loop; the pool and the engines may come up later."""
        for engine in self._engines:
            await engine.client.start()
        if self._run_dir is not None:
            self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        """End all requests and leave."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        for engine in self._engines:
            await engine.client.close()

    # -- state ----------------------------------------------------------------------------------

    def health(self) -> tuple[bool, str]:
        """Whether the engines get on with their work; with several models, as long as one of them does."""
        if len(self._engines) == 1:
            return self._engines[0].health()
        found = [(engine, *engine.health()) for engine in self._engines]
        ill = [f"{engine.name}: {reason}" for engine, well, reason in found if not well]
        if not ill:
            return True, "all models that are loaded are ready"
        return len(ill) < len(found), "; ".join(ill)

    @property
    def ready(self) -> bool:
        """Requests are taken, for one of the models at least."""
        return any(
            engine.status.state in ("unloaded", "unloading")
            or (engine.status.state != "asleep" and engine.client.ready)
            for engine in self._engines
        )

    # -- use ------------------------------------------------------------------------------------

    def needs_wait(self, index: int) -> bool:
        """Whether `hold` may have to wait. Raises EngineUnavailableError for a model that is asleep."""
        engine = self._engines[index]
        if engine.status.state == "asleep":
            raise EngineUnavailableError(
                f"The model {engine.name!r} is asleep until POST /wake_up.", code="model_asleep", param="model"
            )
        return not self.is_static and not (engine._is_held and not engine._makes_way)

    async def hold(self, index: int, timeout: float, account: int = 0) -> None:
        """Keep the model loaded until `release`, as often as it is called.

        Args:
            account: whose request it is; models that have no room together are loaded in turn by account.

        Raises:
            EngineUnavailableError: it is asleep, there is no room for it, it cannot be loaded, or not in time.
            QueueFullError: too many requests wait for it.
        """
        engine = self._engines[index]
        needs_wait = self.needs_wait(index)
        if not needs_wait:
            if not self.is_static:
                self._tell_of(engine, account)
            engine._num_uses += 1
            return
        engine._num_uses += 1
        try:
            _check_queue(engine, account)
            await self._ask(engine, timeout, account)
        except BaseException:
            self.release(index)
            raise

    def release(self, index: int) -> None:
        """One use of the model ends."""
        engine = self._engines[index]
        engine._num_uses -= 1
        if engine._is_used or self.is_static:
            return
        engine._used_at = time.monotonic()
        if engine._makes_way:
            self._release_unused(engine)
        else:
            asyncio.get_running_loop().call_later(LINGER, self._release_lingering, engine)

    def keep(self, index: int, seconds: float) -> None:
        """Keep the model for `seconds` after its last request from now on; infinite: for ever."""
        if self.is_static:
            return
        self._send(KeepAlive(index, None if seconds == math.inf else seconds))

    async def sleep(self, index: int, *, keep: bool = True) -> None:
        """Unload the model once it has finished its requests; later ones are refused until `wake`.

        With `keep` its weights stay in host memory where there is room for them.

        Raises:
            EngineUnavailableError: the pool is not there.
        """
        token = next(self._tokens)
        await self._order(Sleep(token, index, keep), token)

    async def wake(self, index: int) -> None:
        """Load the model, asleep or not. Raises EngineUnavailableError where that fails."""
        token = next(self._tokens)
        await self._order(Wake(token, index), token)
        await self._wait_ready(self._engines[index])

    async def _ask(self, engine: Engine, timeout: float, account: int) -> None:
        if engine._answer is None:
            if not engine._is_held:
                self._send(Hold(engine.index))
            engine._answer = asyncio.get_running_loop().create_future()
            engine._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self._tell_of(engine, account)
        answer = engine._answer
        engine._waiting[account] += 1
        try:
            await asyncio.wait({answer}, timeout=timeout)
        finally:
            if not answer.done():
                engine._waiting -= Counter((account,))
        if not answer.done():
            raise EngineUnavailableError(
                f"The model {engine.name!r} was not loaded within {timeout:g} seconds; please try again later.",
                code="model_loading",
                param="model",
            )
        answer.result()
        await self._wait_ready(engine)

    def _tell_of(self, engine: Engine, account: int) -> None:
        if account not in engine._accounts and len(engine._accounts) < MAX_ACCOUNTS:
            self._send(Used(engine.index, account))
            engine._accounts.add(account)

    async def _wait_ready(self, engine: Engine) -> None:
        """The pool may hear of an engine's readiness sooner than this process."""
        deadline = asyncio.get_running_loop().time() + READY_PATIENCE
        while not engine.client.ready and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(READY_POLL)

    async def _order(self, message: Sleep | Wake, token: int) -> None:
        done = self._orders[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            await done
        finally:
            del self._orders[token]

    def _release_lingering(self, engine: Engine) -> None:
        if time.monotonic() - engine._used_at >= 0.9 * LINGER:  # timers may be early
            self._release_unused(engine)

    def _release_unused(self, engine: Engine) -> None:
        if engine._is_used or not engine._is_held:
            return
        engine._is_held = engine._makes_way = False
        engine._accounts.clear()
        messages: list[ToPool] = [Release(engine.index, engine._used_at)]
        if engine._waiting:  # they have waited for this
            messages.append(Hold(engine.index))
        else:
            engine._answer = None
        self._send(*messages)

    # -- link -----------------------------------------------------------------------------------

    def _send(self, *messages: ToPool) -> None:
        """Together, so that the pool sees no state in between."""
        if self._writer is None or self._writer.is_closing():
            raise EngineUnavailableError("The server is starting or stopping; please try again later.")
        self._writer.write(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))

    async def _read(self) -> None:
        decoder: msgspec.json.Decoder[FromPool] = msgspec.json.Decoder(FromPool)
        assert self._run_dir is not None
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(pool_address(self._run_dir))
                break
            except OSError:  # the pool does not listen yet
                await asyncio.sleep(CONNECT_POLL)
        while line := await reader.readline():
            self._take(decoder.decode(line))
        self._writer.close()

    def _take(self, message: FromPool) -> None:
        match message:
            case Statuses(models):
                for engine, status in zip(self._engines, models, strict=True):
                    engine.status = status
                    engine.client.is_dismissed = status.state in UNUSED
            case Granted(model):
                self._settle(self._engines[model], None)
            case Refused(model, reason, code):
                self._settle(self._engines[model], EngineUnavailableError(reason, code=code, param="model"))
            case Yield():
                for engine in self._engines:
                    self._release_unused(engine)
                self._send(Yielded())
            case MakeWay(model):
                engine = self._engines[model]
                engine._makes_way = engine._is_held
                self._release_unused(engine)
            case GoOn(model):
                if self._engines[model]._is_held:
                    self._settle(self._engines[model], None)
            case Done(token, reason):
                done = self._orders.get(token)
                if done is not None and not done.done():
                    if reason is None:
                        done.set_result(None)
                    else:
                        done.set_exception(EngineUnavailableError(reason, code="model_load_failed", param="model"))

    def _settle(self, engine: Engine, error: EngineUnavailableError | None) -> None:
        answer, engine._answer = engine._answer, None
        engine._is_held, engine._makes_way = error is None, False
        engine._waiting.clear()
        if answer is not None and not answer.done():
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
        if error is not None:
            engine._accounts.clear()
        elif engine._num_uses == 0:  # those that asked have left
            self._release_unused(engine)


def _check_queue(engine: Engine, account: int) -> None:
    """Raise QueueFullError where too many wait; a queue full of others takes an account's up to its fair share."""
    num_waiting, share = engine._waiting.total(), MAX_WAITING // (len(engine._waiting) + 1)
    if num_waiting >= MAX_WAITING and (engine._waiting[account] >= share or num_waiting >= 2 * MAX_WAITING):
        raise QueueFullError(f"Too many requests wait for the model {engine.name!r}; please try again later.")


def _client_of(run_dir: str | Path, index: int, num_engines: int) -> ModelClient:
    members = [EngineClient(engine_dir(run_dir, index, number)) for number in range(num_engines)]
    return members[0] if num_engines == 1 else ReplicatedClient(members)
