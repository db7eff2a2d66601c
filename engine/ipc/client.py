"""The app's client of the engine: submit requests, read their outputs, check its health.

One EngineClient serves one event loop. It needs no supervisor: it learns of the engine's death from its own
connection, and of its health from the heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from tessera.engine.contract.errors import (
    EngineError,
    EngineUnavailableError,
)
from tessera.engine.contract.logs import request_context
from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AbortRequests,
    Accepted,
    AccountRef,
    AdapterDone,
    AdapterInfo,
    Adapters,
    AddEmbedding,
    AddRequest,
    ClientMessage,
    EmbedderRole,
    EmbeddingOutput,
    EngineInfo,
    EngineMessage,
    GetMetrics,
    GpuUsage,
    Heartbeat,
    Hello,
    LoadAdapter,
    Metrics,
    PrefixChanges,
    Ready,
    ResetPrefixCache,
    SchedulerStats,
    Sibling,
    StepOutputs,
    TokenIds,
    UnloadAdapter,
    client_encoder,
    request_address,
)
from tessera.engine.contract.passes.pass_queue import PassQueue
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.heartbeat import HeartbeatReceiver
from tessera.engine.ipc.request_stream import Inbox, RequestStream, error_of
from tessera.engine.ipc.sockets.connection import Connection
from tessera.engine.ipc.vectors_inbox import VectorsInbox

logger = logging.getLogger("tessera.client")

if TYPE_CHECKING:
    import numpy as np

Vectors: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

MAX_SILENCE = 3.0  # seconds without a heartbeat until the engine counts as not well
STALL_LIMITS = {"cuda": 30.0, "cpu": 300.0}  # seconds for one step until the engine counts as stuck
METRICS_TIMEOUT = 5.0
HISTORY_LENGTH = 241  # heartbeats of two minutes
RECONNECT_DELAY = 0.5  # seconds
RECEIVE_SECONDS = 0.005  # for messages, before other tasks of the event loop have their turn
WAKE_SECONDS = 0.002  # for consumers of outputs in one pass of the event loop
LEAST_WAKES, MOST_WAKES = 8, 64  # consumers in one pass, each of which takes about a tenth of a millisecond


class Watcher(Protocol):
    """Hears what an engine says beside its outputs."""

    def on_stats(self, time: float, stats: SchedulerStats) -> None: ...
    def on_prefixes(self, changes: PrefixChanges) -> None: ...
    def on_end(self) -> None: ...


class EngineClient:
    """One app process's connection to the engine with its sockets in `run_dir`.

    Attributes:
        info: what the engine said of itself when it was last ready.
        adapters: those that the engine serves, by name; None until it has said so.
        is_dismissed: the engine is ended on purpose, so its end is no fault.
        history: (time, stats) of this engine's heartbeats in the last two minutes, the newest last.
        watcher: set before `start`, if at all.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.info: EngineInfo | None = None
        self.adapters: dict[str, AdapterInfo] | None = None
        self.is_dismissed = False
        self.history: deque[tuple[float, SchedulerStats]] = deque(maxlen=HISTORY_LENGTH)
        self.watcher: Watcher | None = None
        self._run_dir = run_dir
        self._load_of_others = 0  # as of the last heartbeat
        self._most_sequences = [0, 0]  # of this client since the last heartbeat, and between the two before
        self._epoch: str | None = None
        self._first_ready = asyncio.Event()
        self._lost: str | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._wakes = PassQueue(Inbox.wake, WAKE_SECONDS, LEAST_WAKES, MOST_WAKES)
        self._abandoned: list[str] = []  # of which the engine is to hear
        self._owed_resets: set[tuple[int, ...] | None] = set()  # of which the next engine is to hear; None: all
        self._vectors: dict[str, VectorsInbox] = {}
        self._adapter_waiters: dict[int, asyncio.Future[None]] = {}
        self._metrics_waiters: dict[int, asyncio.Future[bytes]] = {}
        self._counter = itertools.count()
        self._id_prefix = uuid.uuid4().hex[:12]
        self._encoder = client_encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._link = contextlib.ExitStack()

    async def start(self) -> None:
        """Connect, in the running event loop; the engine may come up later."""
        self._loop = asyncio.get_running_loop()
        self._connect()

    async def wait_first_ready(self) -> None:
        """Wait until this client has for the first time heard that the engine takes requests."""
        await self._first_ready.wait()

    async def close(self) -> None:
        """End all requests and leave; later ones are refused."""
        self._epoch, self._lost = None, "the server is shutting down"
        self._fail_all(self._lost)
        self._link.close()

    @property
    def ready(self) -> bool:
        """The engine takes requests."""
        # The last heartbeat may be of before the engine was loaded, so its `ready` does not count.
        last = self._heartbeats.last
        return self._epoch is not None and not (last is not None and last.draining and last.epoch == self._epoch)

    @property
    def load(self) -> int:
        """Sequences and embeddings under way at the engine: this client's, and half a second ago the others'."""
        return len(self._inboxes) + len(self._vectors) + self._load_of_others

    @property
    def gpu(self) -> GpuUsage | None:
        """Use of the engine's GPU a few seconds ago; None if unknown."""
        last = self._heartbeats.last
        return last.gpu if last is not None and self._epoch is not None else None

    def health(self) -> tuple[bool, str]:
        """Whether the engine is ready, alive and getting on with its work; and a sentence about it."""
        if self._epoch is None or self.info is None:
            return False, self._lost or "the engine is starting"
        if not self.ready:
            return False, "the engine is shutting down"
        if self._heartbeats.silent_for > MAX_SILENCE:
            return False, f"the engine has shown no sign of life for {self._heartbeats.silent_for:.0f} s"
        if self._heartbeats.stalled_for > STALL_LIMITS["cpu" if self.info.device == "cpu" else "cuda"]:
            return False, f"the engine has worked on one step for {self._heartbeats.stalled_for:.0f} s"
        return True, "the engine is ready"

    def submit(self, prompt_token_ids: TokenIds, params: SamplingParams) -> RequestStream:
        """`submit_all` for a request of one sequence."""
        return self.submit_all([(prompt_token_ids, params)])[0]

    def submit_all(
        self,
        sequences: Sequence[tuple[TokenIds, SamplingParams]],
        *,
        priority: int = 0,
        cache_salt: str = "",
        num_choices: int = 1,
        account: AccountRef = NO_ACCOUNT,
        adapter: str = "",
        prediction: TokenIds | None = None,
    ) -> list[RequestStream]:
        """Send a request of several sequences; must be called in the client's event loop.

        Args:
            sequences: prompts and parameters, which differ in what `Sibling` has, and in nothing else.
            priority, cache_salt, num_choices, account, adapter, prediction: see `AddRequest`.

        Raises:
            EngineUnavailableError: the engine is not ready or shows no life. Every other refusal is
                raised by the streams.
        """
        well, reason = self.health()
        if not well:
            raise EngineUnavailableError(f"{reason}; please try again later")
        request_ids = [self._new_id() for _ in sequences]
        (first_prompt, shared), *others = sequences
        siblings = []
        before = first_prompt
        for request_id, (prompt, params) in zip(request_ids[1:], others, strict=True):
            new_prompt = prompt if prompt is not before else None
            siblings.append(
                Sibling(
                    request_id, params.seed, params.max_tokens, params.min_tokens, params.prompt_logprobs, new_prompt
                )
            )
            before = prompt
        request = AddRequest(
            request_ids[0],
            first_prompt,
            shared,
            time.monotonic(),
            priority,
            cache_salt,
            num_choices,
            account,
            siblings,
            adapter,
            prediction,
        )
        streams = []
        for request_id in request_ids:
            inbox = self._inboxes[request_id] = Inbox(account.id)
            streams.append(RequestStream(self, request_id, inbox))
        self._most_sequences[0] = max(self._most_sequences[0], len(self._inboxes))
        self._send(request)
        return streams

    async def embed(
        self,
        inputs: Sequence[Sequence[int]],
        *,
        role: EmbedderRole = "main",
        first_lengths: Sequence[int] = (),
        account: AccountRef = NO_ACCOUNT,
    ) -> Vectors:
        """Embeddings [inputs, dimension] of unit length, or a scorer's logits [inputs, labels]; see `AddEmbedding`.

        Cancelling it stops the work.

        Raises:
            RequestError: an input is wrong or too long, too many requests wait, or the engine is not there.
        """
        well, reason = self.health()
        if not well:
            raise EngineUnavailableError(f"{reason}; please try again later")
        request_id = self._new_id()
        inbox = self._vectors[request_id] = VectorsInbox(self._loop)
        self._send(AddEmbedding(request_id, [array("i", one) for one in inputs], role, list(first_lengths), account))
        try:
            vectors = await inbox.whole
        except asyncio.CancelledError:
            if request_id in self._vectors:
                self._send(AbortRequests([request_id]))
            raise
        finally:
            self._vectors.pop(request_id, None)
        import numpy as np  # other requests need none of it

        return np.frombuffer(vectors, "<f4").reshape(len(inputs), -1)

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False, by_server: bool = False) -> None:
        """Serve the adapter in a folder of the engine's machine; it is in `adapters` afterwards.

        Args:
            by_server: see `LoadAdapter`.

        Raises: RequestError: the name is taken and not to be replaced, the folder is at fault, or the engine is not
            there or loads none.
        """
        await self._change_adapters(LoadAdapter(next(self._counter), name, folder, replace, by_server))

    async def unload_adapter(self, name: str, *, by_server: bool = False) -> None:
        """Serve an adapter no more; requests that have begun with it are finished. Raises RequestError."""
        await self._change_adapters(UnloadAdapter(next(self._counter), name, by_server))

    async def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        well, reason = self.health()
        if not well:
            raise EngineUnavailableError(f"{reason}; please try again later")
        waiter = self._adapter_waiters[message.token] = self._loop.create_future()
        try:
            self._send(message)
            await waiter
        finally:
            del self._adapter_waiters[message.token]

    def reset_prefix_cache(self, accounts: list[int] | None = None) -> None:
        """Have the engine forget all cached prefixes, or those of these accounts.

        One that is not well, or does not run, hears of it again when it is ready next: what it has on disk outlasts it.
        """
        if self._epoch is not None:
            self._send(ResetPrefixCache(accounts))
        if not self.health()[0]:
            self._owed_resets.add(None if accounts is None else tuple(accounts))

    async def metrics(self) -> bytes:
        """The engine's metrics in Prometheus text format.

        Raises:
            EngineUnavailableError: the engine is not there or does not answer in time.
        """
        if self._epoch is None:
            raise EngineUnavailableError(self._lost or "the engine is starting")
        token = next(self._counter)
        waiter = self._metrics_waiters[token] = self._loop.create_future()
        self._send(GetMetrics(token))
        try:
            return await asyncio.wait_for(waiter, METRICS_TIMEOUT)
        except asyncio.TimeoutError:
            raise EngineUnavailableError("the engine did not answer in time") from None
        finally:
            del self._metrics_waiters[token]

    def _new_id(self) -> str:
        """Begins with the HTTP request's id, which the engine's log lines show."""
        context = request_context.get() or {}
        return f"{context.get('id', self._id_prefix)}-{next(self._counter)}"

    def _connect(self) -> None:
        with contextlib.ExitStack() as link:  # undone whole where a part fails
            self._heartbeats = HeartbeatReceiver(self._run_dir, self._on_heartbeat)
            link.callback(self._heartbeats.close)
            self._connection = Connection(request_address(self._run_dir), self._receive)
            link.callback(self._connection.close)
            self._send(Hello())
            self._link = link.pop_all()

    def _reconnect(self) -> None:
        """Connect, now or as soon as there are descriptors and memory for it."""
        try:
            self._connect()
        except OSError as error:
            logger.error("the engine cannot be connected to: %s; tried again in %.1f s", error, RECONNECT_DELAY)
            timer = self._loop.call_later(RECONNECT_DELAY, self._reconnect)
            self._link.callback(timer.cancel)

    def _send(self, message: ClientMessage) -> None:
        self._connection.send(self._encoder.encode(message))

    def _receive(self) -> None:
        connection = self._connection
        end = time.monotonic() + RECEIVE_SECONDS
        while connection.received and not connection.is_closed:
            self._dispatch(self._decoder.decode(connection.received.popleft()))
            if time.monotonic() >= end:
                self._loop.call_soon(self._receive)
                return
        if connection.is_lost and not connection.is_closed:
            self._engine_lost()

    def _dispatch(self, message: EngineMessage) -> None:
        if type(message) is StepOutputs:
            inboxes = self._inboxes
            waiting = []
            for output in message.outputs:
                request_id = output.request_id
                inbox = inboxes.get(request_id)
                if inbox is not None:
                    if output.finish_reason is not None:
                        del inboxes[request_id]
                    # A consumer at work looks before it waits, and one that has an output will be woken.
                    if inbox.output is None and inbox.waiter is not None:
                        waiting.append(inbox)
                    inbox.deliver(output)
            self._wake(waiting)
        elif type(message) is Accepted:
            waiting = []
            for request_id in message.request_ids:
                accepted = self._inboxes.get(request_id)
                if accepted is not None:
                    accepted.accepted = True
                    waiting.append(accepted)
            self._wake(waiting)
        elif type(message) is EmbeddingOutput:
            vectors = self._vectors.get(message.request_id)
            if vectors is not None:
                vectors.deliver(message)
        elif type(message) is Adapters:
            self.adapters = {adapter.name: adapter for adapter in message.adapters}
        elif type(message) is AdapterDone:
            adapter_waiter = self._adapter_waiters.get(message.token)
            if adapter_waiter is not None and not adapter_waiter.done():
                if message.refusal is not None:
                    adapter_waiter.set_exception(error_of(message.refusal))
                else:
                    adapter_waiter.set_result(None)
        elif type(message) is Ready:
            self._epoch, self.info, self._lost = message.epoch, message.info, None
            self._heartbeats.note_life()
            owed, self._owed_resets = self._owed_resets, set()
            for accounts in owed:
                self._send(ResetPrefixCache(None if accounts is None else list(accounts)))
            self._first_ready.set()
        elif type(message) is Metrics:
            waiter = self._metrics_waiters.get(message.token)
            if waiter is not None and not waiter.done():
                waiter.set_result(message.text)

    def _wake(self, waiting: list[Inbox]) -> None:
        """In turn by account: all of a step's outputs come at once."""
        num_at_once = self._wakes.enter(len(waiting))
        for inbox in waiting[:num_at_once]:
            inbox.wake()
        if num_at_once < len(waiting):
            self._wakes.put(waiting[num_at_once:])

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self._epoch is not None and heartbeat.epoch != self._epoch:
            self._loop.call_soon(self._check_epoch)
            return
        is_news = not self.history or heartbeat.stats_time > self.history[-1][0]
        if self._epoch is not None and heartbeat.stats is not None and is_news:
            stats = heartbeat.stats
            self.history.append((heartbeat.stats_time, stats))
            # The figures may be half a second old, and of sequences that have ended since.
            own = max(self._most_sequences)
            self._load_of_others = max(0, stats.num_running + stats.num_waiting - own)
            self._most_sequences = [len(self._inboxes), self._most_sequences[0]]
            if self.watcher is not None:
                self.watcher.on_stats(heartbeat.stats_time, stats)
        if self.watcher is not None and heartbeat.prefixes is not None:
            self.watcher.on_prefixes(heartbeat.prefixes)

    def _check_epoch(self) -> None:
        last = self._heartbeats.last
        if self._epoch is not None and last is not None and last.epoch != self._epoch:
            self._engine_lost()

    def _engine_lost(self) -> None:
        """The engine process is gone: take what it still sent, fail the rest, wait for the next one."""
        received = self._connection.take_rest()
        while received:
            self._dispatch(self._decoder.decode(received.popleft()))
        if self._epoch is not None:
            level = logging.DEBUG if self.is_dismissed and not self._inboxes else logging.WARNING
            logger.log(level, "the engine process ended with %d requests in flight", len(self._inboxes))
            self._lost = "the engine process ended and is being restarted"
        self._epoch = None
        self.history.clear()
        self._load_of_others = 0
        if self.watcher is not None:
            self.watcher.on_end()
        self._fail_all("the engine process ended while it worked on this request")
        self._link.close()
        self._reconnect()

    def _fail_all(self, reason: str) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.fail(EngineError(reason, code="engine_died"))
        self._wake(list(inboxes.values()))
        vectors, self._vectors = self._vectors, {}
        for of_request in vectors.values():
            of_request.fail(EngineError(reason, code="engine_died"))
        for adapter_waiter in self._adapter_waiters.values():
            if not adapter_waiter.done():
                adapter_waiter.set_exception(EngineError(reason, code="engine_died"))
        for waiter in self._metrics_waiters.values():
            if not waiter.done():
                waiter.set_exception(EngineUnavailableError(reason))

    def abandon(self, request_id: str) -> None:
        """The engine is told to stop the request, in the event loop's next turn."""
        if self._inboxes.pop(request_id, None) is not None:
            if not self._abandoned:  # those of a request with many sequences go as one message
                self._loop.call_soon(self._send_aborts)
            self._abandoned.append(request_id)

    def _send_aborts(self) -> None:
        request_ids, self._abandoned = self._abandoned, []
        self._send(AbortRequests(request_ids))

    def abandon_from_anywhere(self, request_id: str) -> None:
        """The same from any thread, also when the event loop is closed."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed, and with it this client
            self._loop.call_soon_threadsafe(self.abandon, request_id)
