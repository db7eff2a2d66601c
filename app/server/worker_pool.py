"""Keeps further app processes running beside the first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process

import msgspec

from tessera import PACKAGE_ROOT
from tessera.app.keys.api_key import AcceptedKeys
from tessera.app.settings import AppSettings
from tessera.engine.contract.environment import environment_without_secrets

logger = logging.getLogger("tessera.worker")

FIRST_BACK_OFF, LONGEST_BACK_OFF = 1.0, 30.0  # seconds before a restart
HEALTHY_AFTER = 60.0  # seconds of life after which the back-off begins anew
HEARTBEAT_INTERVAL = 1.0  # seconds
SILENT_WHILE_STARTING, SILENT_WHILE_SERVING = 120, 30  # intervals without a heartbeat
READ_BYTES = 4096
KILL_DELAY = 5.0  # seconds beyond the drain timeout


class WorkerLaunch(msgspec.Struct, frozen=True):
    """The line of JSON that a worker reads from its standard input, which then stays open for its life.

    Later lines are `Reload`.
    """

    run_dir: str
    socket_fd: int
    drain_timeout: int
    settings: AppSettings


class Reload(msgspec.Struct, frozen=True):
    """Changed settings for a worker, which it applies at once.

    Attributes:
        keys: API keys to accept; None: as before.
        certificates: the files for TLS have changed.
    """

    keys: AcceptedKeys | None = None
    certificates: bool = False


class WorkerPool:
    """Keeps `num_workers` further app processes running, with numbers from 1."""

    def __init__(self, num_workers: int, launch: WorkerLaunch, silent_intervals: int = SILENT_WHILE_SERVING) -> None:
        self._num_workers = num_workers
        self._launch = launch
        self._silent_intervals = silent_intervals
        self._stopping = asyncio.Event()
        self._processes: set[Process] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_running(1 + i)) for i in range(self._num_workers)]

    def terminate(self) -> None:
        """Ask the workers to finish their requests and end."""
        self._stopping.set()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                process.terminate()

    def replace_keys(self, keys: AcceptedKeys) -> None:
        """Let the workers, and those that are started later, accept these API keys."""
        settings = msgspec.structs.replace(self._launch.settings, api_keys=keys.plain, keys=keys.named)
        self._launch = msgspec.structs.replace(self._launch, settings=settings)
        self._tell(Reload(keys=keys))

    def reload_certificates(self) -> None:
        """Let the workers read the files for TLS again."""
        self._tell(Reload(certificates=True))

    def _tell(self, message: Reload) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def join(self) -> None:
        """Wait for the end of all workers after `terminate`; late ones are killed."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=self._launch.drain_timeout + KILL_DELAY)
        if late:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await asyncio.gather(*self._tasks)

    async def _keep_running(self, app_process: int) -> None:
        back_off, num_ends = FIRST_BACK_OFF, 0
        while not self._stopping.is_set():
            begin = time.monotonic()
            try:
                what = f"ended with exit code {await self._run_once(app_process)}"
            except Exception as error:  # descriptors, memory or processes are short; they may not be later
                what = f"could not be started: {error!r}"
            if self._stopping.is_set():
                return
            if time.monotonic() - begin >= HEALTHY_AFTER:
                back_off, num_ends = FIRST_BACK_OFF, 0
            num_ends += 1
            again = f", for the {num_ends}. time in a row" if num_ends > 1 else ""
            logger.error("an app process %s%s; it is restarted in %.1f s", what, again, back_off)
            await _wait_at_most(self._stopping, back_off)
            back_off = min(2 * back_off, LONGEST_BACK_OFF)

    async def _run_once(self, app_process: int) -> int:
        """One app process, from its start to its end; -> its exit code."""
        settings = self._launch.settings
        shared = [fd for fd in (settings.count_fd, settings.key_use_fd) if fd is not None]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tessera.app.server.worker",
            cwd=PACKAGE_ROOT,
            stdin=PIPE,
            stdout=PIPE,
            env=environment_without_secrets(sends_traces=True),
            pass_fds=(self._launch.socket_fd, *shared),
            start_new_session=True,
        )
        assert process.stdin is not None
        self._processes.add(process)
        try:
            if self._stopping.is_set():
                process.terminate()
            settings = msgspec.structs.replace(self._launch.settings, app_process=app_process)
            launch = msgspec.structs.replace(self._launch, settings=settings)
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            await self._follow_heartbeats(process)
            return await process.wait()
        finally:
            self._processes.discard(process)

    async def _follow_heartbeats(self, process: Process) -> None:
        """Until the process ends; one that falls silent, because it was stopped or hangs, is killed.

        Silence is counted in waits of this process, so that its own sleep, or the machine's, is none.
        """
        assert process.stdout is not None
        num_silent, allowed = 0, SILENT_WHILE_STARTING
        while True:
            try:
                if not await asyncio.wait_for(process.stdout.read(READ_BYTES), HEARTBEAT_INTERVAL):
                    return
                num_silent, allowed = 0, self._silent_intervals
            except asyncio.TimeoutError:
                num_silent += 1
            if num_silent > allowed:
                logger.error(
                    "an app process has shown no life for %.0f s and is killed", num_silent * HEARTBEAT_INTERVAL
                )
                process.kill()
                return


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
