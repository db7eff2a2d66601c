"""Processes that render chat templates: started when needed, one job at a time, replaced when one ends."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import weakref

import msgspec

from tessera import PACKAGE_ROOT
from tessera.app.text.renderer import Rendered, RendererSetup, RenderJob
from tessera.engine.contract.errors import EngineUnavailableError

# How a process ends that went over a limit of its own; any other end came from outside.
LIMIT_SIGNALS = frozenset({signal.SIGXCPU, signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS})
TRIES = 2
EXIT_TIMEOUT = 5.0

logger = logging.getLogger(__name__)


class RenderProcesses:
    """Renderers of one model's templates. Methods may be called from several threads, each of which waits."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._setup = msgspec.json.encode(RendererSetup(sources)) + b"\n"
        self._idle: queue.LifoQueue[_RenderProcess] = queue.LifoQueue()

    def start(self) -> None:
        """Have one process running, so that the first prompt does not wait for its start."""
        self._idle.put(_RenderProcess(self._setup))

    def render(self, job: RenderJob) -> Rendered:
        """
        Raises:
            EngineUnavailableError: the process could not be started, or was ended from outside, twice in a row.
        """
        line = msgspec.json.encode(job) + b"\n"
        for _ in range(TRIES):
            try:
                process = self._idle_process() or _RenderProcess(self._setup)
            except OSError:
                continue  # no memory, descriptors or processes at this moment
            answer = process.ask(line)
            if answer:
                self._idle.put(process)
                return msgspec.json.decode(answer, type=Rendered)
            code = process.exit_code()
            if -code in LIMIT_SIGNALS:
                return Rendered(error="The chat template takes too long or too much memory to render these messages.")
            logger.warning("the process that renders chat templates ended with code %d", code)
        raise EngineUnavailableError("The chat template could not be rendered just now; please try again.")

    def _idle_process(self) -> _RenderProcess | None:
        """One that still runs; those that were ended meanwhile, maybe all at once, are no tries of a job."""
        with contextlib.suppress(queue.Empty):
            while True:
                process = self._idle.get_nowait()
                if process.runs():
                    return process
                logger.warning("an idle process that renders chat templates ended with code %d", process.exit_code())
        return None

    def close(self) -> None:
        """End the processes that are idle; a busy one ends with its job's thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()


class _RenderProcess:
    """One running renderer; it ends when this object goes."""

    def __init__(self, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tessera.app.text.renderer"],
            cwd=PACKAGE_ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._finish = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(setup)

    def ask(self, line: bytes) -> bytes:
        """The line that answers `line`; empty where the process ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return b""

    def runs(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int:
        """Of a process whose output has ended; negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_TIMEOUT)
        self.end()
        return self._process.returncode

    def end(self) -> None:
        """Kill it, if it still runs."""
        self._finish()


def _environment() -> dict[str, str]:
    """Nothing that a template should learn; where the modules are, since they may be there alone."""
    found = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    if path := os.environ.get("PYTHONPATH"):
        found["PYTHONPATH"] = path
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
