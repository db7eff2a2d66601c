"""The HTTP side of one app process: uvicorn on a listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn

from tessera.app.keys.api_key import AcceptedKeys
from tessera.app.keys.key_ring import KeyRing
from tessera.app.server.application import create_app
from tessera.app.server.connection import BoundedConnection
from tessera.app.server.connection_limit import ConnectionLimit
from tessera.app.server.listener import BACKLOG
from tessera.app.settings import AppSettings
from tessera.app.text.tokenizer import IdTokenizer
from tessera.engine.ipc.client import EngineClient

TICKS_BETWEEN_SWEEPS = 10
LAST_WORDS = 1.0  # seconds for errors after the drain
KEEP_ALIVE = 75  # seconds an idle connection is kept, longer than clients usually do


def freeze_what_is_loaded() -> None:
    """To be called before serving: what was loaded stays, so that later garbage collections, which hold up every
    stream, need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


class HttpServer(uvicorn.Server):
    """Uvicorn, with the handling of signals left to its owner."""

    def __init__(self, client: EngineClient, settings: AppSettings, drain_timeout: int) -> None:
        """Raises ConfigError if the model's tokenizer or templates cannot be used."""
        app = create_app(client, settings)
        self.has_tokenizer = not isinstance(app.state.model.tokenizer, IdTokenizer)
        self.has_template = app.state.model.template is not None
        self._key_ring: KeyRing | None = app.state.key_ring
        self._stall_timeout = settings.stall_timeout
        limit = ConnectionLimit(settings.max_connections, app.state.http_counts)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(BoundedConnection, head_timeout=settings.body_timeout, limit=limit)),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=drain_timeout,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % TICKS_BETWEEN_SWEEPS == 0:
            for connection in list(self.server_state.connections):
                cast(BoundedConnection, connection).drop_if_unread(self._stall_timeout)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain; what is cut off at its end still sends an error, for which it has a moment."""
        await super().shutdown(sockets)
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS)

    def replace_keys(self, keys: AcceptedKeys) -> None:
        """Accept these API keys from now on, in a server that was started with keys."""
        if self._key_ring is not None:
            self._key_ring.replace(keys)

    def stop(self) -> None:
        """Accept nothing more, and end once what runs has been answered or `drain_timeout` is over."""
        self.should_exit = True
