"""The engine process: `python -m tessera.engine.ipc.process RUN_DIR REPORT_FD`, an EngineCore behind a ZMQ socket.

The supervisor writes an EngineConfig as one line of JSON to standard input and keeps that pipe open;
when it ends, the parent has died, and this process exits too. The start is reported over the inherited
REPORT_FD as lines of JSON (`EngineReport`). Exit codes: 0 drained, 1 fault, 2 ConfigError.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
import zmq

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import (
    ConfigError,
    DeviceError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestError,
)
from tessera.engine.contract.heap import HeapTrimmer
from tessera.engine.contract.logs import configure_logging, request_fields
from tessera.engine.contract.messages import (
    AbortRequests,
    Accepted,
    Adapters,
    AddEmbedding,
    AddRequest,
    ClientMessage,
    Drain,
    EmbedderRole,
    EmbeddingInfo,
    EmbeddingOutput,
    EngineInfo,
    EngineMessage,
    EngineReport,
    GetMetrics,
    GpuUsage,
    Heartbeat,
    Hello,
    LoadAdapter,
    LoadProgress,
    Metrics,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    SchedulerStats,
    ScorerInfo,
    Sleep,
    Slept,
    StartFailed,
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
from tessera.engine.ipc.metrics_thread import MetricsThread
from tessera.engine.ipc.sockets import has_message
from tessera.engine.ipc.turns import TimedRunner, Turns
from tessera.engine.tensor import Buffer, Device

if TYPE_CHECKING:
    from tessera.engine.adapters.catalog import AdapterCatalog
    from tessera.engine.drafters.draft_model import DraftModel
    from tessera.engine.kv_tiers.prefix_report import PrefixReport
    from tessera.engine.kv_tiers.tiers import KVTiers
    from tessera.engine.models.config import ModelConfig
    from tessera.engine.ops.interface import Ops
    from tessera.engine.ranks.parallel_runner import ParallelRunner
    from tessera.engine.runner.model_runner import ModelRunner

logger = logging.getLogger("tessera.engine")

FLUSH_MS = 2000  # an exiting engine waits so long for clients to take its last outputs
RECEIVE_SECONDS = 0.005  # for messages between two steps; one that has begun is taken to its end
STDIN_FD = 0


class Core(Protocol):
    """The part of EngineCore that this process uses; `client` is opaque to the core."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    def add_request(self, request: AddRequest, client: bytes) -> None: ...
    def abort(self, request_ids: list[str], client: bytes) -> None: ...
    def step(self) -> Mapping[bytes, list[RequestOutput]]: ...
    def stats(self) -> SchedulerStats: ...
    def reset_prefix_cache(self, accounts: Collection[int] | None = None) -> None: ...


class Embedding(Protocol):
    """The part of Embedder that this process uses."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_steps(self) -> int: ...
    def add_request(self, request: AddEmbedding, client: bytes) -> None: ...
    def abort(self, request_ids: list[str], client: bytes) -> None: ...
    def step(self, *, busy: bool) -> list[tuple[bytes, EmbeddingOutput]]: ...


class Sleeping(Protocol):
    """The part of Sleeper that this process uses."""

    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...


@dataclass(frozen=True)
class LoadedEngine:
    core: Core
    info: EngineInfo
    render_metrics: Callable[[], bytes]
    embedders: Mapping[EmbedderRole, Embedding] = field(default_factory=dict)
    gpu_usage: Callable[[], GpuUsage | None] = lambda: None
    turns: Turns = field(default_factory=Turns)
    sleeper: Sleeping | None = None
    prefix_report: PrefixReport | None = None
    adapters: AdapterCatalog | None = None
    loads_adapters: bool = False  # when clients ask for it

    @property
    def has_work(self) -> bool:
        return self.core.has_work or any(embedder.has_work for embedder in self.embedders.values())

    @property
    def num_steps(self) -> int:
        return self.core.num_steps + sum(embedder.num_steps for embedder in self.embedders.values())


Progress: TypeAlias = Callable[[str, int, int], None]  # stage, done, total
Loader: TypeAlias = Callable[[EngineConfig, Progress], LoadedEngine]


class EngineProcess:
    """Moves messages between the clients' sockets and the core, one step after the other."""

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
        self._unconfirmed: set[tuple[bytes, str]] = set()  # sequences that came in this turn, with their clients
        self._metrics: MetricsThread | None = None
        self._stats: SchedulerStats | None = None
        self._stats_at = 0.0
        self._decoder = client_decoder()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone is an error
        self._router.setsockopt(zmq.SNDHWM, 0)  # a ROUTER at its limit drops tokens silently
        self._router.bind(request_address(run_dir))
        self._heartbeat = HeartbeatSender(
            self._context, run_dir, self._make_heartbeat, STDIN_FD, on_orphaned=lambda: _leave_orphaned(owner_dir)
        )
        self._heartbeat.start()

    def close(self) -> None:
        self._heartbeat.stop()
        if self._metrics is not None:
            self._metrics.close()
        self._router.close(linger=FLUSH_MS)
        self._context.term()

    def run(self, engine: LoadedEngine) -> None:
        """Serve until drained; an exception from a step ends the process."""
        self._engine = engine
        core = engine.core
        wake_up = self._drain_on_sigterm()
        self._adapters = AdapterLoads(engine.adapters, self._run_dir, self._wake_up, allowed=engine.loads_adapters)
        self._adapters.restore()
        self._metrics = MetricsThread(lambda: engine.render_metrics() + engine.turns.render(), self._wake_up)
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(wake_up, zmq.POLLIN)
        while True:
            self._has_work = engine.has_work
            self._refresh_stats(core)
            if not self._has_work:
                if self._draining:
                    return
                if self._order is not None:
                    self._carry_out(self._order, engine.sleeper)
                    continue
                if wake_up.fileno() in dict(poller.poll()):
                    wake_up.recv(64)
            engine.turns.begin()
            self._take_turn(engine)
            engine.turns.end()

    def _take_turn(self, engine: LoadedEngine) -> None:
        """Receive what has come, do a step, and send what it gave."""
        core, metrics = engine.core, self._metrics
        assert metrics is not None
        unconfirmed, self._unconfirmed = self._unconfirmed, set()
        self._receive(core)
        for clients, text in metrics.take():
            for client, token in clients:
                self._send(client, Metrics(token, text))
        self._answer_adapters()
        if core.has_work:
            self._has_work = True
            for client, outputs in core.step().items():
                self._send_outputs(core, client, outputs)
                if unconfirmed or self._unconfirmed:
                    begun = {(client, output.request_id) for output in outputs}
                    unconfirmed -= begun
                    self._unconfirmed -= begun
        if unconfirmed:
            self._confirm(unconfirmed)
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
        """One pass of each embedder that has work, between two steps of the core."""
        for embedder in engine.embedders.values():
            if embedder.has_work:
                self._has_work = True
                engine.turns.begin_computation()
                outputs = embedder.step(busy=engine.core.has_work)
                engine.turns.end_computation()
                for client, output in outputs:
                    self._send(client, output)

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

    def _confirm(self, sequences: set[tuple[bytes, str]]) -> None:
        """Tell clients that these are in the queue.

        Only those that have had no output a step after they came: an output says the same, and comes as soon for most.
        """
        by_client: dict[bytes, list[str]] = {}
        for client, request_id in sequences:
            by_client.setdefault(client, []).append(request_id)
        for client, request_ids in by_client.items():
            self._send(client, Accepted(request_ids))

    def _receive(self, core: Core) -> None:
        """Take messages for at most RECEIVE_SECONDS, so that a flood of them never holds up the steps for long."""
        deadline = time.monotonic() + RECEIVE_SECONDS
        while time.monotonic() < deadline:
            if not has_message(self._router):
                return
            frames = self._router.recv_multipart(zmq.NOBLOCK)
            try:
                client, payload = frames
                message = self._decoder.decode(payload)
            except (ValueError, msgspec.MsgspecError) as error:
                logger.warning("ignored a malformed message: %s", error)
                continue
            self._handle(core, client, message)

    def _handle(self, core: Core, client: bytes, message: ClientMessage) -> None:
        assert self._engine is not None
        match message:
            case AddRequest():
                self._add(core, client, message)
            case AddEmbedding():
                self._add_embedding(client, message)
            case AbortRequests():
                core.abort(message.request_ids, client)
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
        try:
            if self._refuses is not None:
                raise EngineUnavailableError(self._refuses)
            core.add_request(request, client)
        except RequestError as error:
            refusal = error
        except Exception:
            logger.exception("a request was refused by a fault", extra={"fields": request_fields(request.request_id)})
            refusal = EngineError("the engine failed to take this request")
        else:
            if request.sampling_params.grammar is None:
                self._unconfirmed.update((client, request_id) for request_id in request.request_ids)
            return
        self._send(client, StepOutputs(self.epoch, [refused(each, refusal) for each in request.request_ids]))

    def _add_embedding(self, client: bytes, request: AddEmbedding) -> None:
        assert self._engine is not None
        try:
            if self._refuses is not None:
                raise EngineUnavailableError(self._refuses)
            if request.role not in self._engine.embedders:
                raise InvalidRequestError(
                    f"this model makes no {'scores' if request.role == 'scorer' else 'embeddings'}", param="model"
                )
            self._engine.embedders[request.role].add_request(request, client)
        except RequestError as error:
            refusal = error
        except Exception:
            logger.exception("a request was refused by a fault", extra={"fields": request_fields(request.request_id)})
            refusal = EngineError("the engine failed to take this request")
        else:
            return
        self._send(client, EmbeddingOutput(request.request_id, refusal=refused(request.request_id, refusal)))

    def _send_outputs(self, core: Core, client: bytes, outputs: list[RequestOutput]) -> None:
        if not self._send(client, StepOutputs(self.epoch, outputs)):
            core.abort([output.request_id for output in outputs], client)

    def _send(self, client: bytes, message: EngineMessage) -> bool:
        """-> False if the client is gone."""
        try:
            self._router.send_multipart([client, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

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


def serve(load: Loader) -> int:
    """Run an engine process to its end; -> its exit code."""
    run_dir, report_fd, owner_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is the server's to handle
    config = msgspec.json.decode(_read_line(STDIN_FD), type=EngineConfig)
    configure_logging(config.log_format, config.log_level, process="engine")

    def report(message: EngineReport) -> None:
        os.write(report_fd, msgspec.json.encode(message) + b"\n")

    gc.disable()  # until all is loaded, of which next to nothing is garbage
    process = EngineProcess(run_dir, owner_dir, report)
    try:
        engine = load(config, lambda stage, done, total: report(LoadProgress(stage, done, total)))
        gc.collect()
        gc.freeze()  # later collections skip all that was loaded
        gc.enable()
        HeapTrimmer().start()
        report(Ready(process.epoch, engine.info))
    except ConfigError as error:
        report(StartFailed(str(error), user_error=True))
        process.close()
        return 2
    except Exception as error:
        logger.exception("the engine failed to start")
        report(StartFailed(f"{type(error).__name__}: {error}", user_error=False))
        process.close()
        return 1
    try:
        process.run(engine)
    except Exception:
        logger.exception("the engine failed")
        return 1
    finally:
        process.close()
    return 0


def load_engine(config: EngineConfig, progress: Progress) -> LoadedEngine:
    """Device, model, weights, KV cache and scheduler for `config`.

    Raises: ConfigError (ModelError) for settings that cannot be met; DeviceError.
    """
    # Imported here, so that a failing import is reported like any failed start.
    from tessera.engine.adapters.make import make_catalog
    from tessera.engine.core.account import Accounts
    from tessera.engine.core.core import EngineCore
    from tessera.engine.core.embedder import EmbeddingOnlyCore
    from tessera.engine.core.metrics import EngineMetrics
    from tessera.engine.drafters.make import make_drafter
    from tessera.engine.grammar.compiler import GrammarCompiler
    from tessera.engine.kv_tiers.make import make_tiers
    from tessera.engine.kv_tiers.prefix_report import PrefixReport
    from tessera.engine.models.config import load_config
    from tessera.engine.models.partition import Partition, Rank
    from tessera.engine.models.weights.rounding import rounded_while_loading
    from tessera.engine.ops.make import make_ops
    from tessera.engine.ranks.metrics import RankMetrics
    from tessera.engine.runner.devices import select_device
    from tessera.engine.runner.embedding_engine import EmbeddingEngine
    from tessera.engine.runner.memory.sleeper import make_releasable
    from tessera.engine.runner.model_runner import ModelRunner

    start = time.monotonic()
    folder = Path(config.model)
    model = load_config(folder)
    if config.quantization != "none":
        model = rounded_while_loading(model, config.quantization, folder)
    device, device_reason = select_device(config.device)
    if config.can_sleep and config.tensor_parallel_size == 1:
        make_releasable(device)
    config = config.with_device_defaults("cpu" if device.name == "cpu" else "cuda")
    config.verify()
    if config.batch_invariant and device.name == "cpu":
        raise ConfigError("--batch-invariant is for CUDA devices; on the CPU sums depend on the batch")
    ops = make_ops(device, batch_invariant=config.batch_invariant)
    adapters, max_lora_rank = make_catalog(config, model, device)
    accounts = Accounts()
    embedding = EmbeddingEngine(config, accounts)
    Partition(model, Rank(0, config.tensor_parallel_size))  # refused before anything is loaded
    if model.is_encoder:
        encoder_core, info = embedding.load_alone(model, ops, device_reason, progress)
        encoder = LoadedEngine(encoder_core, info, embedding.render_metrics, embedding.embedders, watch_gpu(device))
        return with_sleeper(encoder, config, device)
    for sentence in config.unused_speculative_hints:
        logger.warning("%s", sentence)
    drafter = make_drafter(config, model, ops)
    grammars = GrammarCompiler(folder, model.vocab_size, model.eos_token_ids)  # reads its tokenizer meanwhile
    embedding.load_beside(ops, progress)  # before the KV cache takes what memory is left
    ranks: ParallelRunner | None = None
    if config.tensor_parallel_size > 1:
        ranks = make_ranks(config, model, ops, progress)
        runner = ranks.first
        if not runner.generates:
            raise ConfigError("--tensor-parallel-size is for models that generate text, and this one has no head")
    else:
        runner = ModelRunner(config, model, device, ops, progress, max_lora_rank=max_lora_rank, drafter=drafter)
        embedding.add_decoder(model, runner)
    planes = ranks.planes if ranks is not None else runner.kv_cache.planes if runner.generates else []
    tiers, tier_metrics = make_tiers(runner.config, device, planes, runner.dtype, config.served_name or folder.name)
    info = engine_info(
        runner,
        ranks,
        device_reason=device_reason,
        load_seconds=time.monotonic() - start,
        embeddings=embedding.infos,
        scorer=embedding.scorer,
        tiers=tiers,
        drafter=drafter,
    )
    if not runner.generates:
        grammars.close()
        only = EmbeddingOnlyCore()
        embedder = LoadedEngine(only, info, embedding.render_metrics, embedding.embedders, watch_gpu(device))
        return with_sleeper(embedder, config, device, runner.scratch)
    turns = Turns(config.served_name or folder.name, config.log_stalls)
    prefix_report = PrefixReport() if config.reports_prefixes else None
    core = EngineCore(
        config,
        TimedRunner(runner if ranks is None else ranks, turns),
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        num_kv_blocks=runner.num_kv_blocks,
        eos_token_ids=model.eos_token_ids,
        short_rope_len=runner.short_rope_len,
        grammars=grammars,
        metrics=EngineMetrics(config.served_name or folder.name),
        accounts=accounts,
        tiers=tiers,
        prefix_report=prefix_report,
        adapters=adapters,
        draft_limits=drafter.limits if drafter is not None else None,
    )

    rank_metrics = None
    if ranks is not None:
        rank_metrics = RankMetrics(
            config.served_name or folder.name, ranks.rendezvous.states, ranks.weight_bytes, ranks.kv_cache_bytes
        )

    def render_metrics() -> bytes:
        offload = tier_metrics.render() if tier_metrics is not None else b""
        of_ranks = rank_metrics.render() if rank_metrics is not None else b""
        return core.render_metrics() + embedding.render_metrics() + offload + of_ranks

    engine = LoadedEngine(
        core,
        info,
        render_metrics,
        embedding.embedders,
        watch_gpu(device),
        turns,
        prefix_report=prefix_report,
        adapters=adapters,
        loads_adapters=config.allow_lora_loading,
    )
    if ranks is not None:
        return engine  # ranks sleep on none of their devices yet
    return with_sleeper(engine, config, device, runner.scratch, core.drop_kv_cache)


def with_sleeper(
    engine: LoadedEngine,
    config: EngineConfig,
    device: Device,
    scratch: Sequence[Buffer] = (),
    prepare: Callable[[], None] = lambda: None,
) -> LoadedEngine:
    """The engine, able to sleep where it shall be and the device can; `scratch` is memory that may be lost."""
    from tessera.engine.runner.memory.sleeper import make_sleeper

    sleeper = make_sleeper(device, scratch, engine.info.weight_bytes, prepare) if config.can_sleep else None
    if sleeper is None:
        return engine
    return replace(engine, info=msgspec.structs.replace(engine.info, sleep_bytes=sleeper.host_bytes), sleeper=sleeper)


def make_ranks(config: EngineConfig, model: ModelConfig, ops: Ops, progress: Progress) -> ParallelRunner:
    """Those that share a model, on the kind of device that `ops` is for. Raises: ConfigError."""
    if ops.device.name == "cpu":
        from tessera.engine.ranks.parallel_runner import make_cpu_runner

        return make_cpu_runner(config, model, progress)
    # Imported only here, so that a machine without the driver never loads its bindings.
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ranks.cuda_runner import make_cuda_runner

    assert isinstance(ops.device, CudaDevice), f"no ranks on {ops.device}"
    return make_cuda_runner(config, model, ops.device, ops, progress)


def engine_info(
    runner: ModelRunner,
    ranks: ParallelRunner | None = None,
    *,
    device_reason: str,
    load_seconds: float,
    embeddings: tuple[EmbeddingInfo, ...],
    scorer: ScorerInfo | None,
    tiers: KVTiers | None,
    drafter: DraftModel | None = None,
) -> EngineInfo:
    """The facts of a loaded decoder; `runner` is rank 0's where `ranks` share it."""
    from tessera.engine.gguf.model import stored_bytes
    from tessera.engine.models.weights.build import num_parameters

    config, model, device = runner.config, runner.model, runner.device
    return EngineInfo(
        device=device.name,
        device_name=getattr(device, "device_name", f"{os.cpu_count()} cores"),
        num_ranks=config.tensor_parallel_size,
        device_reason=device_reason,
        dtype=runner.dtype,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=runner.block_size,
        num_kv_blocks=runner.num_kv_blocks,
        kv_cache_bytes=runner.kv_cache_bytes if ranks is None else sum(ranks.kv_cache_bytes),
        kv_cache_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        num_host_kv_blocks=tiers.pool.num_slots if tiers is not None else 0,
        num_disk_kv_blocks=tiers.disk.max_blocks if tiers is not None and tiers.disk is not None else 0,
        weight_bytes=runner.weight_bytes if ranks is None else sum(ranks.weight_bytes),
        weight_offload=runner.weight_offload,
        num_parameters=runner.num_parameters if ranks is None else num_parameters(model),
        eos_token_ids=model.eos_token_ids,
        load_seconds=load_seconds,
        generates=runner.generates,
        speculates=config.speculation_settings is not None,
        draft=drafter.info if drafter is not None else None,
        embeddings=embeddings,
        scorer=scorer,
        stored_bytes=(runner.stored_bytes if ranks is None else ranks.stored_bytes) or stored_bytes(Path(config.model)),
        short_rope_len=runner.short_rope_len,
    )


def watch_gpu(device: Device) -> Callable[[], GpuUsage | None]:
    """-> a function that returns the device's use a few seconds ago."""
    if device.name == "cpu":
        return lambda: None
    from tessera.engine.cuda.nvml import UsageMonitor

    monitor = UsageMonitor()
    monitor.start()

    def usage() -> GpuUsage | None:
        latest = monitor.latest
        return GpuUsage(*latest) if latest is not None else None

    return usage


def _read_line(fd: int) -> bytes:
    """One line, and not a byte more: the heartbeat thread watches the rest."""
    line = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return line


def _leave_orphaned(owner_dir: str) -> None:
    """Clean up and exit after the parent's death; the main thread may be in a step."""
    shutil.rmtree(owner_dir, ignore_errors=True)
    os._exit(1)


def main() -> None:
    code = serve(load_engine)
    sys.stderr.flush()
    if code == 1:
        os._exit(code)  # a device in an error state can hang the interpreter's shutdown
    sys.exit(code)


if __name__ == "__main__":
    main()
