"""A further app process, which shares the listening socket and the engine with the first.

Run as `python -m tessera.app.server.worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket

import msgspec
import uvloop

from tessera.app.server.http_server import HttpServer, engines_of, freeze_what_is_loaded
from tessera.app.server.logs import configure_logging
from tessera.app.server.worker_pool import HEARTBEAT_INTERVAL, Reload, WorkerLaunch
from tessera.app.settings import AppSettings
from tessera.app.sockets.tls import make_context
from tessera.engine.contract.errors import ConfigError

logger = logging.getLogger("tessera.worker")

STDIN_FD, STDOUT_FD = 0, 1
READ_BYTES = 1 << 16


async def run_worker(launch: WorkerLaunch) -> None:
    """Serve until SIGTERM, or until the first app process ends."""
    loop = asyncio.get_running_loop()
    engines = engines_of(launch.run_dir, launch.settings)
    await engines.start()
    server = HttpServer(engines, launch.settings, launch.drain_timeout)
    freeze_what_is_loaded(server.garbage, server.is_idle)
    os.set_blocking(STDOUT_FD, False)
    _show_life()
    heartbeat = asyncio.create_task(_beat())
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    loop.add_reader(STDIN_FD, ParentLines(server, launch.settings).read)
    await server.serve(sockets=[socket.socket(fileno=launch.socket_fd)])
    await engines.close()
    heartbeat.cancel()


class ParentLines:
    """Messages that the first app process sends on standard input after the start."""

    def __init__(self, server: HttpServer, settings: AppSettings) -> None:
        self._server = server
        self._settings = settings
        self._unread = b""

    def read(self) -> None:
        """Take up what the parent says; leave if it has ended."""
        received = os.read(STDIN_FD, READ_BYTES)
        if not received:
            os._exit(1)
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            self._take_up(msgspec.json.decode(line, type=Reload))

    def _take_up(self, reload: Reload) -> None:
        if reload.keys is not None:
            self._server.replace_keys(reload.keys)
        if reload.certificates:
            try:
                context = make_context(self._settings)
            except ConfigError as error:  # the files have changed once more since the parent looked
                logger.error("this app process keeps its certificate: %s", error)
                return
            if context is not None:
                self._server.replace_tls(context)


def _show_life() -> None:
    with contextlib.suppress(BlockingIOError):  # the first process is stopped, and the pipe is full
        os.write(STDOUT_FD, b".")


async def _beat() -> None:
    """Show the first app process that this one's event loop turns."""
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL)
        _show_life()


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the first process reads the keys again
    with open(STDIN_FD, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    launch = msgspec.json.decode(line, type=WorkerLaunch)
    configure_logging(launch.settings)
    uvloop.run(run_worker(launch))


if __name__ == "__main__":
    main()
