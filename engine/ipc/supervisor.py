"""Starts the engine process, notices its death at once, and restarts it with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tessera import PACKAGE_ROOT
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.environment import environment_without_secrets
from tessera.engine.contract.errors import ConfigError, TesseraError
from tessera.engine.contract.machine import num_cores
from tessera.engine.contract.messages import (
    EngineInfo,
    EngineReport,
    LoadProgress,
    Ready,
    Sleep,
    Slept,
    StartFailed,
    WakeUp,
    Woken,
    client_encoder,
    request_address,
)
from tessera.engine.ipc.heartbeat import HeartbeatReceiver
from tessera.engine.ipc.sockets.connection import send_once

logger = logging.getLogger("tessera.supervisor")

MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 107, ZMQ keeps some for itself
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 30.0  # seconds before a restart
HEALTHY_AFTER = 60.0  # seconds of service after which the back-off begins anew
MAX_FIRST_STARTS = 3  # an engine that was never ready is not tried more often
SILENCE_WHILE_LOADING, SILENCE_WHILE_READY = 120.0, 15.0  # seconds without a heartbeat
REPORT_BYTES = 1 << 16  # of the engine's reports at a time
STDERR_FD = 2
END_POLL = 0.01  # seconds; waiting in a thread would need one, and there may be none to be had
STEP_TIMEOUTS = {"cuda": 60.0, "cpu": 600.0}  # seconds; a step on a CPU may be long in good faith


class EngineStartError(TesseraError):
    """The engine could not be started, through no fault of the user's options."""


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


def make_run_dir() -> Path:
    """A new folder for the engine's sockets that only this user can enter."""
    try:
        run_dir = Path(tempfile.mkdtemp(prefix="tessera-"))
    except OSError as error:
        raise ConfigError(f"there is no room for temporary files: {error}; see TMPDIR") from None
    if len(os.fsencode(request_address(run_dir))) > MAX_SOCKET_PATH:
        run_dir.rmdir()
        raise ConfigError(
            f"the folder for temporary files has too long a path for a socket: {run_dir.parent}; "
            "set TMPDIR to a shorter one"
        )
    return run_dir


class EngineSupervisor:
    """Keeps one engine process running.

    Args:
        run_dir: from `make_run_dir`, or a folder in one; removed by `stop`.
        owner_dir: removed by the engine if this process dies before; None takes `run_dir`.
        module: what to run; anything that calls `tessera.engine.ipc.process.serve`.
        on_progress: called with every `LoadProgress` of a start; may be set later.
        step_timeout: seconds after which an unfinished step counts as hung; None takes the device's.
        silence_timeout: seconds without a heartbeat after which a ready engine is killed.
        environment: variables of the engine process beside those of this one.
    """

    def __init__(
        self,
        config: EngineConfig,
        run_dir: Path,
        *,
        module: str = "tessera.engine.ipc.process",
        on_progress: Callable[[LoadProgress], None] | None = None,
        step_timeout: float | None = None,
        silence_timeout: float = SILENCE_WHILE_READY,
        owner_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.state = EngineState.STARTING
        self.reason = "the engine is starting"
        self.info: EngineInfo | None = None
        self.pid: int | None = None
        self._config = config
        self._run_dir = run_dir
        self._owner_dir = owner_dir if owner_dir is not None else run_dir
        self._module = module
        self.on_progress = on_progress
        self._step_timeout = step_timeout
        self._silence_timeout = silence_timeout
        self._environment = dict(environment or {})
        self._stopping = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._start_failure: StartFailed | None = None
        self._ready_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._launched = asyncio.Event()
        self._heartbeats: HeartbeatReceiver | None = None
        self._sleeps = False  # from the order to sleep until it is awake: an engine that ends is not restarted
        self._reply: asyncio.Future[Slept | Woken] | None = None

    @property
    def has_work(self) -> bool:
        """Whether the engine had requests half a second ago."""
        last = self._heartbeats.last if self._heartbeats is not None else None
        return last is not None and last.has_work

    def start(self) -> None:
        """Begin; returns at once. See `wait_started`."""
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise())

    async def wait_launched(self) -> None:
        """Return when the first process runs, or could not be made."""
        await self._launched.wait()

    async def wait_started(self) -> EngineInfo:
        """Wait for the first time the engine is ready.

        Raises:
            ConfigError: it refused its options or the model.
            EngineStartError: it failed repeatedly.
        """
        assert self._started is not None, "start() comes first"
        return await asyncio.shield(self._started)

    async def stop(self, timeout: float = 10.0) -> None:
        """Let the engine finish what runs, for at most `timeout` seconds, and end it."""
        self._stopping.set()
        self._set_state(EngineState.STOPPED, "the engine has been stopped")
        if self._process is not None:
            self._process.terminate()
        if self._task is not None:
            _, unfinished = await asyncio.wait([self._task], timeout=timeout)
            if unfinished:
                logger.warning("the engine did not end within %.0f s and is killed", timeout)
                if self._process is not None:
                    self._process.kill()
            await self._task
        shutil.rmtree(self._run_dir, ignore_errors=True)

    async def sleep(self, timeout: float) -> bool:
        """Have the engine finish its requests, keep its weights in host memory and give the device's memory back.

        False where it could not, or not within `timeout` seconds: it takes no requests then, and is to be stopped.
        """
        if self.state is not EngineState.READY:
            return False
        self._sleeps = True
        try:
            reply = await asyncio.wait_for(self._send_order(Sleep()), timeout)
        except (asyncio.TimeoutError, EngineStartError):
            return False
        return isinstance(reply, Slept) and reply.error is None

    async def wake_up(self) -> None:
        """Raises: EngineStartError if it cannot, for example because the memory is taken; it is to be stopped then."""
        await self._send_order(WakeUp())
        self._sleeps = False

    def _send_order(self, order: Sleep | WakeUp) -> asyncio.Future[Slept | Woken]:
        reply = self._reply = asyncio.get_running_loop().create_future()
        if self._process is None:
            reply.set_exception(EngineStartError("the engine has ended"))
            return reply
        try:
            send_once(request_address(self._run_dir), client_encoder().encode(order))
        except OSError as error:  # descriptors are short, say
            reply.set_exception(EngineStartError(f"no order can be sent to the engine: {error}"))
        return reply

    def _set_state(self, state: EngineState, reason: str) -> None:
        self.state, self.reason = state, reason

    async def _supervise(self) -> None:
        assert self._started is not None
        back_off = FIRST_BACK_OFF
        num_starts = 0
        while not self._stopping.is_set():
            num_starts += 1
            self._start_failure = None
            self._ready_at = None
            try:
                what = self._describe_end(await self._run_once())
            except Exception as error:  # descriptors, memory or processes are short; they may not be later
                logger.debug("the engine could not be run", exc_info=True)
                what = f"the engine could not be run: {error!r}"
            if self._reply is not None and not self._reply.done():
                self._reply.set_exception(EngineStartError(what))
            if self._stopping.is_set():
                return
            if self._sleeps:
                logger.error("%s while the model slept", what)
                self._set_state(EngineState.STOPPED, what)
                return
            if not self._started.done():
                failure = self._start_failure
                if failure is not None and failure.user_error:
                    self._give_up(ConfigError(failure.message))
                    return
                if num_starts == MAX_FIRST_STARTS:
                    self._give_up(EngineStartError(what))
                    return
            elif self._ready_at is not None and time.monotonic() - self._ready_at >= HEALTHY_AFTER:
                back_off = FIRST_BACK_OFF
            logger.error("%s; it is restarted in %.1f s", what, back_off)
            self._set_state(EngineState.RESTARTING, what)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), back_off)
            back_off = min(2 * back_off, LONGEST_BACK_OFF)

    def _describe_end(self, exit_code: int) -> str:
        if self._start_failure is not None:
            return f"the engine failed to start: {self._start_failure.message}"
        if exit_code < 0:
            return f"the engine process was ended by signal {-exit_code}"
        return f"the engine process ended with exit code {exit_code}"

    def _give_up(self, error: TesseraError) -> None:
        assert self._started is not None
        self._set_state(EngineState.FAILED, str(error))
        self._started.set_exception(error)
        self._started.exception()  # marks it as retrieved, since there may be no waiter

    async def _run_once(self) -> int:
        """One engine process, from its start to its end; -> its exit code, negative for a signal."""
        heartbeats = self._heartbeats = HeartbeatReceiver(self._run_dir)
        try:
            process, report_reader = self._launch()
        except BaseException:
            heartbeats.close()
            raise
        finally:
            self._launched.set()
        self._process, self.pid = process, process.pid
        watch = asyncio.create_task(self._kill_when_stuck(process, heartbeats))
        stdin = process.stdin
        assert stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(msgspec.json.encode(self._config) + b"\n")
                stdin.flush()
            await self._follow_reports(report_reader)
        except BaseException:
            process.kill()
            raise
        finally:
            watch.cancel()
            heartbeats.close()
            with contextlib.suppress(OSError):
                stdin.close()
            self.pid = None
            exit_code = await asyncio.shield(_wait_for_end(process))
            self._process = None
        return exit_code

    def _launch(self) -> tuple[subprocess.Popen[bytes], int]:
        """A new engine process, and the descriptor that its reports are read from."""
        report_reader, report_writer = os.pipe()
        command = [sys.executable, "-m", self._module, str(self._run_dir), str(report_writer), str(self._owner_dir)]
        try:
            # The working folder decides what `-m` finds; a session of its own keeps Ctrl-C for the server.
            process = subprocess.Popen(
                command,
                cwd=PACKAGE_ROOT,
                stdin=subprocess.PIPE,
                stdout=STDERR_FD,
                env={**_engine_environment(), **self._environment},
                pass_fds=(report_writer,),
                start_new_session=True,
            )
        except BaseException:
            os.close(report_reader)
            raise
        finally:
            os.close(report_writer)
        return process, report_reader

    async def _follow_reports(self, report_fd: int) -> None:
        """Handle reports until the pipe ends, which is when the process does.

        Read here rather than by a transport: uvloop's closes a pipe's descriptor twice, and by the second time the
        number may be that of a socket of another thread.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        decoder = msgspec.json.Decoder(EngineReport)
        unread = b""

        def read() -> None:
            nonlocal unread
            try:
                received = os.read(report_fd, REPORT_BYTES)
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    self._handle(decoder.decode(line))
            except BlockingIOError:
                return
            except Exception as error:
                loop.remove_reader(report_fd)
                ended.set_exception(error)
                return
            if not received:
                loop.remove_reader(report_fd)
                ended.set_result(None)

        try:
            os.set_blocking(report_fd, False)
            loop.add_reader(report_fd, read)
            await ended
        finally:
            loop.remove_reader(report_fd)
            os.close(report_fd)

    def _handle(self, report: EngineReport) -> None:
        assert self._started is not None
        match report:
            case LoadProgress():
                if self.on_progress is not None:
                    with contextlib.suppress(OSError):  # the disk under standard error is full, say
                        self.on_progress(report)
            case StartFailed():
                self._start_failure = report
            case Slept() | Woken():
                if self._reply is not None and not self._reply.done():
                    self._reply.set_result(report)
            case Ready():
                self.info = report.info
                self._ready_at = time.monotonic()
                if not self._stopping.is_set():
                    self._set_state(EngineState.READY, "the engine is ready")
                if not self._started.done():
                    self._started.set_result(report.info)
                else:
                    logger.info("the engine is ready again")

    async def _kill_when_stuck(self, process: subprocess.Popen[bytes], heartbeats: HeartbeatReceiver) -> None:
        while True:
            await asyncio.sleep(1.0)
            silence_timeout = self._silence_timeout if self._ready_at is not None else SILENCE_WHILE_LOADING
            if heartbeats.silent_for > silence_timeout:
                logger.error("the engine has shown no life for %.0f s and is killed", heartbeats.silent_for)
            elif heartbeats.stalled_for > self._longest_step():
                logger.error("the engine's step has not ended for %.0f s; it is killed", heartbeats.stalled_for)
            else:
                continue
            process.kill()
            return

    def _longest_step(self) -> float:
        if self._step_timeout is not None:
            return self._step_timeout
        return STEP_TIMEOUTS["cpu" if self.info is not None and self.info.device == "cpu" else "cuda"]


async def _wait_for_end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that has closed its reports, and so is about to end."""
    while (exit_code := process.poll()) is None:
        await asyncio.sleep(END_POLL)
    return exit_code


def _engine_environment() -> dict[str, str]:
    """This process's, with a core left to HTTP: BLAS threads that spin for a core which the app uses cost far
    more than they bring (a step of 32 sequences took eight times as long on two cores)."""
    threads = max(1, num_cores() - 1)
    return {"OPENBLAS_NUM_THREADS": str(threads), **environment_without_secrets()}
