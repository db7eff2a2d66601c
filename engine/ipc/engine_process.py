"""An EngineCore behind a socket: messages in, a step, messages out."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable

import msgspec

from tessera.engine.contract.errors import (
    DeviceError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestError,
)
from tessera.engine.contract.heap import OldGarbage
from tessera.engine.contract.logs import request_fields
from tessera.engine.contract.machine import num_cores
from tessera.engine.contract.messages import (
    AbortRequests,
    Accepted,
    Adapters,
    AddEmbedding,
    AddRequest,
    ClientMessage,
    Drain,
    EmbeddingOutput,
    EngineMessage,
    EngineReport,
    GetMetrics,
    Heartbeat,
    Hello,
    LoadAdapter,
    Metrics,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    SchedulerStats,
    Sleep,
    Slept,
    StepOutputs,
    UnloadAdapter,
    WakeUp,
    Woken,
    client_decoder,
    refused,
    request_address,
)
from tessera.engine.ipc.adapter_loads import AdapterLoads
from tessera.engine.ipc.heartbeat import INTERVAL, HeartbeatSender
from tessera.engine.ipc.loaded_engine import Core, LoadedEngine, Sleeping
from tessera.engine.ipc.metrics_thread import MetricsThread
from tessera.engine.ipc.outbox import Outbox, VectorsOutbox
from tessera.engine.ipc.sockets.listener import Listener

logger = logging.getLogger("tessera.engine")

FLUSH_SECONDS = 2.0  # an exiting engine waits so long for clients to take its last outputs
CONFIRM_SECONDS = 0.5  # without an output until a client is told that its request waits
PATIENCE = 0.002  # seconds without work for which the thread stays awake, as the next request often comes by then
CORES_FOR_PATIENCE = 8  # with fewer the app process may need this one
IDLE_SECONDS = 0.05  # without work until what the start has left is done, a few milliseconds at a time
RECEIVE_SECONDS = 0.005  # for messages between two steps; one that has begun is taken to its end
STDIN_FD = 0


class EngineProcess:
    """Moves messages between the clients and the core, one step after the other."""

    def __init__(self, run_dir: str, owner_dir: str, report: Callable[[EngineReport], None]) -> None:
        self.epoch = uuid.uuid4().hex
        self._run_dir = run_dir
        self._adapters: AdapterLoads | None = None
        self._clients: set[bytes] = set()  # that have said Hello
        self._engine: LoadedEngine | None = None
        self._has_work = False
        self._draining = False
        self._report = report
        self._order: Sleep | WakeUp | None = None  # to be carried out when there is no work
        self._is_asleep = False
        self._is_prepared = False  # nothing is left of the start
        self._unconfirmed: dict[tuple[bytes, str], float] = {}  # sequences without an output, and when they came
        self._outbox = Outbox()
        self._vectors = VectorsOutbox()
        self._metrics: MetricsThread | None = None
        self._stats: SchedulerStats | None = None
        self._stats_at = 0.0
        self.garbage = OldGarbage()
        self._decoder = client_decoder()
        self._encoder = msgspec.msgpack.Encoder()
        self._listener = Listener(request_address(run_dir))
        self._heartbeat = HeartbeatSender(
            run_dir, self._make_heartbeat, STDIN_FD, on_orphaned=lambda: _leave_orphaned(owner_dir)
        )
        self._heartbeat.start()

    @property
    def has_work(self) -> bool:
        """May be asked by other threads."""
        return self._has_work

    def close(self) -> None:
        self._heartbeat.stop()
        if self._metrics is not None:
            self._metrics.close()
        self._listener.close(linger=FLUSH_SECONDS)

    def run(self, engine: LoadedEngine) -> None:
        """Serve until drained; an exception from a step ends the process."""
        self._engine = engine
        core = engine.core
        wake_up = self._drain_on_sigterm()
        self._adapters = AdapterLoads(engine.adapters, self._run_dir, self._wake_up, allowed=engine.loads_adapters)
        self._adapters.restore()
        self._metrics = MetricsThread(lambda: engine.render_metrics() + engine.turns.render(), self._wake_up)
        self._listener.watch(wake_up.fileno())
        patience = PATIENCE if engine.info.device != "cpu" and num_cores() >= CORES_FOR_PATIENCE else 0.0
        while True:
            self._has_work = engine.has_work or bool(self._outbox) or bool(self._vectors)
            self._refresh_stats(core)
            self.garbage.look(is_idle=not self._has_work)
            if not self._has_work:
                if self._draining:
                    return
                if self._order is not None:
                    self._carry_out(self._order, engine.sleeper)
                    continue
                if wake_up.fileno() in self._wait(engine, patience):
                    wake_up.recv(64)
            engine.turns.begin()
            self._take_turn(engine)
            engine.turns.end()

    def _wait(self, engine: LoadedEngine, patience: float) -> list[int]:
        """As the listener's `wait`; meanwhile do what the start has left, if there is no work for a while."""
        idle = IDLE_SECONDS
        while not (self._is_prepared or self._is_asleep):
            ready = self._listener.wait(patience, idle)
            if ready or self._listener.has_received:
                return ready
            self._is_prepared = not engine.prepare_next()
            patience = idle = 0.0
        return self._listener.wait(patience)

    def _take_turn(self, engine: LoadedEngine) -> None:
        """Receive what has come, do a step, and send what it gave."""
        core, metrics = engine.core, self._metrics
        assert metrics is not None
        self._receive(core)
        for clients, text in metrics.take():
            for client, token in clients:
                self._send(client, Metrics(token, text))
        self._answer_adapters()
        for client, outputs in self._outbox.take().items():
            self._send_outputs(core, client, outputs)
        if core.has_work:
            self._has_work = True
            for client, outputs in core.step().items():
                self._send_outputs(core, client, self._outbox.put(client, outputs))
                if self._unconfirmed:
                    for output in outputs:
                        self._unconfirmed.pop((client, output.request_id), None)
        if self._unconfirmed:
            self._confirm()
        self._embed(engine)

    def _answer_adapters(self) -> None:
        """Send answers to loads, once all clients know of the adapters."""
        assert self._adapters is not None
        done = self._adapters.take_done()
        if self._adapters.has_news:
            self._adapters.has_news = False
            message = Adapters(self._adapters.infos())
            self._clients = {client for client in self._clients if self._send(client, message)}
        for client, answer in done:
            self._send(client, answer)

    def _embed(self, engine: LoadedEngine) -> None:
        """Between two steps of the core: one pass of each embedder that has work, and vectors that wait to be sent."""
        for embedder in engine.embedders.values():
            if embedder.has_work:
                self._has_work = True
                engine.turns.begin_computation()
                outputs = embedder.step(busy=engine.core.has_work)
                engine.turns.end_computation()
                for client, output in outputs:
                    self._vectors.put(client, output)
        for client, output in self._vectors.take():
            if not self._send(client, output):
                self._vectors.drop(client, [output.request_id])

    @property
    def _refuses(self) -> str | None:
        """Why no new requests are taken."""
        if self._draining:
            return "the engine is shutting down and takes no new requests"
        if self._is_asleep or self._order is not None:
            return "the model is asleep and takes no requests"
        return None

    def _carry_out(self, order: Sleep | WakeUp, sleeper: Sleeping | None) -> None:
        self._order = None
        if isinstance(order, WakeUp):
            if self._is_asleep and sleeper is not None:
                sleeper.wake_up()
            self._is_asleep = False
            self._report(Woken())
            return
        try:
            if sleeper is None:
                raise MemoryError("this engine was not started so that it can sleep")
            if not self._is_asleep:
                sleeper.sleep()
        except (DeviceError, MemoryError) as error:
            logger.warning("the model cannot sleep with its weights in host memory: %s", error)
            self._report(Slept(str(error)))
            return
        self._is_asleep = True
        self._report(Slept())

    def _drain_on_sigterm(self) -> socket.socket:
        """Let SIGTERM start a drain; -> a socket that becomes readable when a signal arrives."""

        def start_drain(signum: int, frame: object) -> None:
            self._draining = True

        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wake_up_sockets = (reader, writer)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, start_drain)
        return reader

    def _wake_up(self) -> None:
        """End the wait for messages, from another thread."""
        with contextlib.suppress(BlockingIOError):  # full, and so already readable
            self._wake_up_sockets[1].send(b"\0")

    def _confirm(self) -> None:
        """Tell clients which sequences have waited for CONFIRM_SECONDS.

        The first output says the same. So most are told nothing: each message wakes the app process and makes it send
        the head of a response on its own, while it has the requests of a burst to read.
        """
        latest = time.monotonic() - CONFIRM_SECONDS
        by_client: dict[bytes, list[str]] = {}
        for (client, request_id), arrived in self._unconfirmed.items():
            if arrived > latest:
                break
            by_client.setdefault(client, []).append(request_id)
        for client, request_ids in by_client.items():
            for request_id in request_ids:
                del self._unconfirmed[client, request_id]
            self._send(client, Accepted(request_ids))

    def _receive(self, core: Core) -> None:
        """Take messages for at most RECEIVE_SECONDS, so that a flood of them never holds up the steps for long."""
        assert self._engine is not None
        deadline = time.monotonic() + RECEIVE_SECONDS
        while time.monotonic() < deadline:
            received = self._listener.receive()
            if received is None:
                return
            client, payload = received
            try:
                message = self._decoder.decode(payload)
            except (ValueError, msgspec.MsgspecError) as error:
                logger.warning("ignored a malformed message: %s", error)
                continue
            self._engine.turns.work_on(getattr(message, "request_id", None))
            self._handle(core, client, message)
            self._engine.turns.work_on(None)

    def _handle(self, core: Core, client: bytes, message: ClientMessage) -> None:
        assert self._engine is not None
        match message:
            case AddRequest():
                self._add(core, client, message)
            case AddEmbedding():
                self._add_embedding(client, message)
            case AbortRequests():
                core.abort(message.request_ids, client)
                self._outbox.drop(client, message.request_ids)
                self._vectors.drop(client, message.request_ids)
                for request_id in message.request_ids:
                    self._unconfirmed.pop((client, request_id), None)
                for embedder in self._engine.embedders.values():
                    embedder.abort(message.request_ids, client)
            case ResetPrefixCache():
                core.reset_prefix_cache(message.accounts)
            case GetMetrics():
                assert self._metrics is not None
                self._metrics.ask(client, message.token)
            case LoadAdapter() | UnloadAdapter():
                assert self._adapters is not None
                self._adapters.begin(client, message)
            case Hello():
                self._clients.add(client)
                self._send(client, Ready(self.epoch, self._engine.info))
                if self._adapters is not None and self._engine.adapters is not None:
                    self._send(client, Adapters(self._adapters.infos()))
            case Drain():
                self._draining = True
            case Sleep() | WakeUp():
                self._order = message

    def _add(self, core: Core, client: bytes, request: AddRequest) -> None:
        refusal = self._try(lambda: core.add_request(request, client), request.request_id)
        if refusal is not None:
            self._send(client, StepOutputs(self.epoch, [refused(each, refusal) for each in request.request_ids]))
        elif request.sampling_params.grammar is None:
            now = time.monotonic()
            self._unconfirmed.update({(client, request_id): now for request_id in request.request_ids})

    def _add_embedding(self, client: bytes, request: AddEmbedding) -> None:
        assert self._engine is not None
        embedders = self._engine.embedders

        def add() -> None:
            if request.role not in embedders:
                raise InvalidRequestError(
                    f"this model makes no {'scores' if request.role == 'scorer' else 'embeddings'}", param="model"
                )
            embedders[request.role].add_request(request, client)

        refusal = self._try(add, request.request_id)
        if refusal is not None:
            self._send(client, EmbeddingOutput(request.request_id, refusal=refused(request.request_id, refusal)))

    def _try(self, add: Callable[[], None], request_id: str) -> RequestError | None:
        """Take a request if requests are taken; -> why it was refused, or None."""
        try:
            if self._refuses is not None:
                raise EngineUnavailableError(self._refuses)
            add()
        except RequestError as error:
            return error
        except Exception:
            logger.exception("a request was refused by a fault", extra={"fields": request_fields(request_id)})
            return EngineError("the engine failed to take this request")
        return None

    def _send_outputs(self, core: Core, client: bytes, outputs: list[RequestOutput]) -> None:
        if outputs and not self._send(client, StepOutputs(self.epoch, outputs)):
            request_ids = [output.request_id for output in outputs]
            core.abort(request_ids, client)
            self._outbox.drop(client, request_ids)

    def _send(self, client: bytes, message: EngineMessage) -> bool:
        """-> False if the client is gone."""
        return self._listener.send(client, self._encoder.encode(message))

    def _refresh_stats(self, core: Core) -> None:
        now = time.monotonic()
        if not self._has_work or now - self._stats_at >= INTERVAL:
            self._stats = core.stats()
            self._stats_at = now

    def _make_heartbeat(self) -> Heartbeat:
        engine = self._engine
        return Heartbeat(
            epoch=self.epoch,
            num_steps=engine.num_steps if engine is not None else 0,
            has_work=self._has_work,
            ready=engine is not None and self._refuses is None,
            stats=self._stats,
            stats_time=self._stats_at if self._has_work else time.monotonic(),
            draining=self._draining,
            gpu=engine.gpu_usage() if engine is not None else None,
            prefixes=engine.prefix_report.take() if engine is not None and engine.prefix_report is not None else None,
        )


def _leave_orphaned(owner_dir: str) -> None:
    """Clean up and exit after the parent's death; the main thread may be in a step."""
    shutil.rmtree(owner_dir, ignore_errors=True)
    os._exit(1)
