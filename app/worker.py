"""Further app processes: `python -m app.worker` shares the listening socket and the engine with the first."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec
import uvloop

from app.http_server import HttpServer
from app.logs import configure_logging
from app.settings import AppSettings
from engine.client import EngineClient

logger = logging.getLogger("tessera.worker")

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
RESTART_DELAY = 1.0  # seconds
KILL_DELAY = 5.0  # seconds beyond the drain timeout
STDIN_FD = 0


class WorkerLaunch(msgspec.Struct, frozen=True):
    """The line of JSON that a worker reads from its standard input, which then stays open for its life."""

    run_dir: str
    socket_fd: int
    drain_timeout: int
    settings: AppSettings


class WorkerPool:
    """Keeps `num_workers` further app processes running."""

    def __init__(self, num_workers: int, launch: WorkerLaunch) -> None:
        self._num_workers = num_workers
        self._launch = launch
        self._stopping = asyncio.Event()
        self._processes: set[Process] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_running()) for _ in range(self._num_workers)]

    def terminate(self) -> None:
        """Let the workers finish what they are doing and end."""
        self._stopping.set()
        for process in self._processes:
            process.terminate()

    async def join(self) -> None:
        """Wait for the end of all workers after `terminate`; who takes too long is killed."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=self._launch.drain_timeout + KILL_DELAY)
        if late:
            for process in self._processes:
                process.kill()
        await asyncio.gather(*self._tasks)

    async def _keep_running(self) -> None:
        while not self._stopping.is_set():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "app.worker",
                cwd=PACKAGE_ROOT,
                stdin=PIPE,
                pass_fds=(self._launch.socket_fd,),
                start_new_session=True,
            )
            assert process.stdin is not None
            self._processes.add(process)
            if self._stopping.is_set():
                process.terminate()
            process.stdin.write(msgspec.json.encode(self._launch) + b"\n")
            exit_code = await process.wait()
            self._processes.discard(process)
            if not self._stopping.is_set():
                logger.error("an app process ended with exit code %d and is restarted", exit_code)
                await _wait_at_most(self._stopping, RESTART_DELAY)


async def run_worker(launch: WorkerLaunch) -> None:
    """Serve until SIGTERM, or until the first app process is gone."""
    loop = asyncio.get_running_loop()
    client = EngineClient(launch.run_dir)
    await client.start()
    server = HttpServer(client, launch.settings, launch.drain_timeout)
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    loop.add_reader(STDIN_FD, _leave_if_orphaned)
    await server.serve(sockets=[socket.socket(fileno=launch.socket_fd)])
    await client.close()


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return


def _leave_if_orphaned() -> None:
    if not os.read(STDIN_FD, 4096):
        os._exit(1)


def main() -> None:
    configure_logging()
    with open(STDIN_FD, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    uvloop.run(run_worker(msgspec.json.decode(line, type=WorkerLaunch)))


if __name__ == "__main__":
    main()
