"""The HTTP side of one app process: a listening socket, and uvicorn on it."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn

from app.application import create_app
from app.settings import AppSettings
from engine.client import EngineClient
from engine.errors import ConfigError

BACKLOG = 2048
KEEP_ALIVE = 75  # seconds an idle connection is kept, longer than clients usually do

_REASONS = {
    errno.EADDRINUSE: "another program already listens there; choose another --port",
    errno.EADDRNOTAVAIL: "this machine does not have that address; choose another --host",
    errno.EACCES: "that port is not allowed to this user; choose a --port above 1023",
}


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host {host} is not an address, nor a name that has one") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, error.strerror)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None
    return listener


class HttpServer(uvicorn.Server):
    """Uvicorn, with the handling of signals left to its owner."""

    def __init__(self, client: EngineClient, settings: AppSettings, drain_timeout: int) -> None:
        """Raises ConfigError if the model's tokenizer or templates cannot be used."""
        super().__init__(
            uvicorn.Config(
                create_app(client, settings),
                http="httptools",
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

    def stop(self) -> None:
        """Accept nothing more, and end once what runs has been answered or `drain_timeout` is over."""
        self.should_exit = True
