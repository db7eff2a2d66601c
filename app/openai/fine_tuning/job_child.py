"""The process of one job, as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import msgspec

from tessera import PACKAGE_ROOT
from tessera.app.training.job_messages import STOP, FromJob, JobLaunch
from tessera.engine.contract.environment import environment_without_secrets

logger = logging.getLogger("tessera.app")

MODULE = "tessera.app.training.job_process"
MAX_LINE = 2**20  # bytes of one message
STOP_TIMEOUT = 60.0  # seconds for a step to end, after which the process is killed
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class JobChild:
    """Ends with this process: its standard input is a pipe from here.

    Args:
        num_threads: of BLAS, on which the order of sums depends, and so the last bits of the result.
    """

    def __init__(self, launch: JobLaunch, num_threads: int) -> None:
        self._launch = launch
        self._num_threads = num_threads
        self._process: Process | None = None

    async def start(self) -> None:
        """Raises OSError."""
        threads = dict.fromkeys(BLAS_THREADS, str(self._num_threads))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            cwd=PACKAGE_ROOT,
            stdin=PIPE,
            stdout=PIPE,
            env={**environment_without_secrets(), **threads},
            start_new_session=True,
            limit=MAX_LINE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._launch) + b"\n")

    async def messages(self) -> AsyncIterator[FromJob]:
        """Until the process ends; one that writes a line that is too long or no message is killed."""
        assert self._process is not None
        stdout = self._process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
                yield msgspec.json.decode(line, type=FromJob)
        except (ValueError, msgspec.DecodeError) as error:
            logger.warning("the process of a fine-tuning job wrote what is no message: %s", error)
            await self.kill()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stdout.read(), STOP_TIMEOUT)  # a pipe is closed once all of it is read

    def stop(self) -> None:
        """Let it save a checkpoint after the current step, and end."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(STOP)

    async def kill(self) -> int:
        """-> the exit code of the process, which has ended then."""
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.kill()
        return await self._process.wait()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None
