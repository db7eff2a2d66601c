"""The HTTP side of one app process: uvicorn on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from fastapi.routing import _IncludedRouter

from tessera.app.engines.engines import Engines
from tessera.app.http.access_log import RequestLog
from tessera.app.http.counts import HttpCounts
from tessera.app.keys.api_key import AcceptedKeys
from tessera.app.keys.key_ring import KeyRing
from tessera.app.ops.metrics_text import Countable
from tessera.app.server.accepts import Accepts
from tessera.app.server.application import create_app
from tessera.app.server.connection import BoundedConnection
from tessera.app.server.connection_limit import SPARE_PLACES, ConnectionLimit
from tessera.app.server.loop_lag import LoopLag
from tessera.app.settings import AppSettings
from tessera.app.sockets.listener import BACKLOG
from tessera.app.sockets.tls import HANDSHAKE_TIMEOUT, TlsContext, make_context
from tessera.app.text.tokenizer import IdTokenizer
from tessera.engine.contract.heap import HeapTrimmer, OldGarbage, bound_heap
from tessera.engine.contract.passes.pass_queue import PassQueue

logger = logging.getLogger("tessera.serve")

TICKS_BETWEEN_SWEEPS = 10
DRAIN_POLL = 0.1  # seconds
LINE_DELAY = 0.002  # seconds from the end of a request to its log line; by then the engine mostly has the next one
LAST_WORDS = 1.0  # seconds for errors after the drain
SWITCH_INTERVAL = 0.0005  # seconds; a thread that renders or encodes waits so long for a busy event loop, several times
READ_SECONDS = 0.002  # for what connections have received, in one pass of the event loop
LEAST_READS, MOST_READS = 16, 64  # connections in one pass, each of which takes about a tenth of a millisecond


def freeze_what_is_loaded(garbage: OldGarbage, is_idle: Callable[[], bool]) -> None:
    """To be called before serving: what was loaded stays, so that later garbage collections, which hold up every
    stream, need not look at it. What comes later goes back to the system.
    """
    garbage.take_over()
    bound_heap()
    HeapTrimmer(is_idle).start()


def share_interpreter() -> None:
    """Let threads have the interpreter's lock soon: beside a busy event loop a chat waited for it for 20 ms."""
    sys.setswitchinterval(SWITCH_INTERVAL)


def prepare_routes(app: FastAPI) -> None:
    """Make what FastAPI would make of a router's routes when it first looks at them, in the midst of serving."""
    for route in app.routes:
        if isinstance(route, _IncludedRouter):
            route.effective_candidates()
            route.effective_low_priority_routes()


def engines_of(run_dir: str | Path, settings: AppSettings) -> Engines:
    """The engines of a server's models, whose pool is in `run_dir`."""
    names = {model.served_model_names[0]: model.data_parallel_size for model in settings.models}
    return Engines.of_run_dir(run_dir, names, is_static=settings.is_static)


class BoundedServer(uvicorn.Server):
    """Uvicorn with bounded connections, the handling of signals left to its owner.

    While it drains it goes on to listen, and answers health checks alone.

    Args:
        tls: of its connections; None: plain HTTP.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: AppSettings,
        counts: HttpCounts,
        *,
        max_connections: int,
        drain_timeout: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._tls = TlsContext.of(tls, max_connections + SPARE_PLACES) if tls is not None else None
        self._drain_timeout = drain_timeout
        self._stall_timeout = settings.stall_timeout
        self._limit = ConnectionLimit(max_connections, counts)
        reads = PassQueue(BoundedConnection.read_later, READ_SECONDS, LEAST_READS, MOST_READS)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(
                    Any,
                    partial(BoundedConnection, head_timeout=settings.body_timeout, limit=self._limit, reads=reads),
                ),
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # app.http.forwarded has its own rules
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=cast(Any, settings.timeout_keep_alive),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, for listening sockets of either family, with a bound on the TLS handshake."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise SystemExit("the application could not be started")
        loop = asyncio.get_running_loop()
        make_protocol = partial(
            cast(Any, self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        handshake = {"ssl_handshake_timeout": HANDSHAKE_TIMEOUT} if self._tls is not None else {}
        self.servers = []
        for listener in sockets or ():
            listen = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
            accepts = Accepts(listener, make_protocol, self._tls, **handshake)
            server = await cast(Any, listen)(
                accepts.make_protocol, sock=listener, ssl=self._tls, backlog=BACKLOG, **handshake
            )
            self.servers.append(server)
        self.started = True

    def replace_tls(self, context: ssl.SSLContext) -> None:
        """Use these certificates for new connections, in a server that was started with TLS."""
        if self._tls is not None:
            self._tls.replace(context)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % TICKS_BETWEEN_SWEEPS == 0:
            for connection in self._connections():
                connection.drop_if_unread(self._stall_timeout)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain; what is cut off at its end still sends an error, for which it has a moment."""
        self.begin_drain()
        for connection in self._connections():
            if not connection.is_spare:
                connection.shutdown()
        tasks = self.server_state.tasks
        try:
            await asyncio.wait_for(self._wait_for_answers(), self._drain_timeout)
        except asyncio.TimeoutError:
            if tasks:
                logger.error("%d requests are cut off at the end of the drain", len(tasks))
            for task in tasks:
                task.cancel(msg="the time for the drain is over")
        await self.lifespan.shutdown()
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS)
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in self._connections():
            if connection.is_spare:
                connection.transport.close()

    async def _wait_for_answers(self) -> None:
        """Until all requests have been answered, health checks left aside."""
        await asyncio.sleep(DRAIN_POLL)
        while not all(connection.is_spare for connection in self._connections()) or self.server_state.tasks:
            await asyncio.sleep(DRAIN_POLL)

    def begin_drain(self) -> None:
        """Not ready from now on, and open to health checks alone."""
        self._app.state.draining = True
        self._limit.begin_drain()

    def stop(self) -> None:
        """Accept nothing more, and end once what runs has been answered or `drain_timeout` is over."""
        self.begin_drain()
        self.should_exit = True

    def _connections(self) -> list[BoundedConnection]:
        return [cast(BoundedConnection, connection) for connection in self.server_state.connections]


class HttpServer(BoundedServer):
    """All of the API."""

    def __init__(self, engines: Engines, settings: AppSettings, drain_timeout: int) -> None:
        """Raises ConfigError if the model's tokenizer or templates, or the files for TLS, cannot be used."""
        app = create_app(engines, settings)
        prepare_routes(app)
        self.has_tokenizer = not isinstance(app.state.models.default.tokenizer, IdTokenizer)
        self.has_template = app.state.models.default.template is not None
        self.counts: Sequence[Countable] = app.state.counts
        self._http_counts: HttpCounts = app.state.http_counts
        self._key_ring: KeyRing | None = app.state.key_ring
        self._log_stalls = settings.log_stalls
        self._request_log: RequestLog = app.state.request_log
        self.garbage = OldGarbage()
        super().__init__(
            app,
            settings,
            self._http_counts,
            max_connections=settings.max_connections,
            drain_timeout=drain_timeout,
            tls=make_context(settings),
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        share_interpreter()
        self._request_log.delay = LINE_DELAY
        self._lag = LoopLag(self._http_counts.observe_lag, self._log_stalls)
        self._lag.start()

    def is_idle(self) -> bool:
        """No request is under way; may be asked by other threads."""
        return not self.server_state.tasks

    async def on_tick(self, counter: int) -> bool:
        self.garbage.look(is_idle=self.is_idle())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._request_log.delay = 0.0
        self._request_log.flush()
        self._lag.stop()

    def replace_keys(self, keys: AcceptedKeys) -> None:
        """Accept these API keys from now on, in a server that was started with keys."""
        if self._key_ring is not None:
            self._key_ring.replace(keys)
