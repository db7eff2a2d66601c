"""A further app process, which shares the listening socket and the engine with the first.

Run as `python -m tessera.app.server.worker`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import msgspec
import uvloop

from tessera.app.server.http_server import HttpServer, freeze_what_is_loaded
from tessera.app.server.logs import configure_logging
from tessera.app.server.worker_pool import WorkerLaunch
from tessera.engine.ipc.client import EngineClient

STDIN_FD = 0


async def run_worker(launch: WorkerLaunch) -> None:
    """Serve until SIGTERM, or until the first app process ends."""
    loop = asyncio.get_running_loop()
    client = EngineClient(launch.run_dir)
    await client.start()
    server = HttpServer(client, launch.settings, launch.drain_timeout)
    freeze_what_is_loaded()
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    loop.add_reader(STDIN_FD, _leave_if_orphaned)
    await server.serve(sockets=[socket.socket(fileno=launch.socket_fd)])
    await client.close()


def _leave_if_orphaned() -> None:
    if not os.read(STDIN_FD, 4096):
        os._exit(1)


def main() -> None:
    with open(STDIN_FD, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    launch = msgspec.json.decode(line, type=WorkerLaunch)
    configure_logging(launch.settings)
    uvloop.run(run_worker(launch))


if __name__ == "__main__":
    main()
