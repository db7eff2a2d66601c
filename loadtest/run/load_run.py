"""One run of a load: client processes send the requests of a workload and return their records."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tessera.loadtest.client import client_process
from tessera.loadtest.client.client_process import Plan, Progress, Report, Result, Start
from tessera.loadtest.client.load_client import Target
from tessera.loadtest.client.records import Records
from tessera.loadtest.run.ctrl_c import ctrl_c_ignored, on_ctrl_c
from tessera.loadtest.run.summary import summarize
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.jobs import write_jobs
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.loadtest.workload.workload import Workload

STREAMS_PER_PROCESS = 32
START_DELAY = 0.02  # seconds, for the message to reach every process
STOP_LIMIT = 10.0  # seconds that a client process has to end
REQUEST_TIMEOUT = 6 * 3600.0

OnProgress: TypeAlias = Callable[[Progress], None]


class ClientProcessError(RuntimeError):
    """A client process ended without its records."""


@dataclass(frozen=True)
class Outcome:
    """Results of a run.

    Attributes:
        records: of all requests that were sent.
        start: `time.perf_counter()` when the first request was due.
        cpu_shares: processor time of each client process over the run's time.
        interrupted: whether Ctrl-C ended it.
        due: seconds after the start at which jobs were due, ascending.
    """

    records: Records
    start: float
    cpu_shares: list[float]
    interrupted: bool
    due: list[float] = field(default_factory=list)


def run_load(
    url: str,
    model: str,
    workload: Workload,
    arrival: Arrival,
    *,
    stream: bool = True,
    processes: int | None = None,
) -> dict[str, Any]:
    """Load the server at base URL `url` with greedy completions; -> the summary, see `summarize`."""
    return summarize(drive(url, RequestTemplate(model, stream=stream), workload, arrival, processes=processes))


def drive(
    url: str,
    template: RequestTemplate,
    workload: Workload,
    arrival: Arrival,
    *,
    headers: dict[str, str] | None = None,
    timeout: float = REQUEST_TIMEOUT,
    processes: int | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    request_id: str | None = None,
    insecure: bool = False,
) -> Outcome:
    """Send the workload's requests when `arrival` says.

    Args:
        headers: sent with each request.
        timeout: most seconds for one request.
        processes: of the client; None: as many as streams and cores suggest.
        seed: of the arrival times.
        on_progress: called several times a second.
        request_id: beginning of each request's X-Request-Id; None: no such header.
        insecure: the server's certificate is not checked.

    Ctrl-C ends the run; requests under way are then recorded as interrupted.

    Raises:
        ClientProcessError: a client process crashed.
    """
    streams = min(arrival.max_concurrency or workload.num_prompts, workload.num_prompts)
    num_processes = min(processes or _suggested_processes(streams), streams)
    endpoint = url.rstrip("/") + template.endpoint
    streamed = template.stream and not template.embeds
    with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
        path = Path(folder) / "jobs"
        offsets = write_jobs(path, workload.jobs(template))
        due = workload.due_times()
        arrivals = arrival.times(len(offsets) - 1, seed).tolist() if due is None else list(due)
        fleet = _Fleet(num_processes)
        try:
            for index in range(num_processes):
                slots = None
                if arrival.max_concurrency is not None:
                    slots = streams // num_processes + (index < streams % num_processes)
                own_id = None if request_id is None else f"{request_id}{index}-"
                target = Target(endpoint, headers or {}, streamed, timeout, own_id, insecure)
                fleet.tell(index, Plan(target, str(path), offsets, arrivals, slots, arrival.max_seconds))
            return replace(fleet.run(on_progress or (lambda _: None)), due=arrivals)
        finally:
            fleet.close()


def _suggested_processes(streams: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(-(-streams // STREAMS_PER_PROCESS), cores // 2))


class _Fleet:
    """The client processes of one run, and the pipes to them."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._counter = context.Value("q", 0)  # kept: its semaphore lives as long as this object
        self._stopped = False
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for index in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=client_process.main, args=(theirs, self._counter), name=f"loadtest-{index}", daemon=True
            )
            with ctrl_c_ignored():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def tell(self, index: int, message: Plan) -> None:
        self._pipes[index].send_bytes(msgspec.msgpack.encode(message))

    def run(self, on_progress: OnProgress) -> Outcome:
        for pipe in self._pipes:
            self._receive(pipe)
        start = time.perf_counter() + START_DELAY
        for pipe in self._pipes:
            pipe.send_bytes(msgspec.msgpack.encode(Start(start)))
        results: dict[Connection, Result] = {}
        progress: dict[Connection, Progress] = {}
        with on_ctrl_c(self._stop):
            while len(results) < len(self._pipes):
                self._gather(results, progress, on_progress)
        records = Records.merge([results[pipe].records for pipe in self._pipes])
        return Outcome(records, start, [results[pipe].cpu_share for pipe in self._pipes], self._stopped)

    def _gather(
        self, results: dict[Connection, Result], progress: dict[Connection, Progress], on_progress: OnProgress
    ) -> None:
        for pipe in wait([pipe for pipe in self._pipes if pipe not in results]):
            assert isinstance(pipe, Connection)
            message = msgspec.msgpack.decode(self._receive(pipe), type=Report)
            if isinstance(message, Result):
                results[pipe] = message
                continue
            progress[pipe] = message
            on_progress(
                Progress(
                    sum(part.done for part in progress.values()),
                    sum(part.failed for part in progress.values()),
                    sum(part.output_tokens for part in progress.values()),
                    sum(part.running for part in progress.values()),
                )
            )

    def _stop(self) -> None:
        self._stopped = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the process has ended
                pipe.send_bytes(b"stop")

    def _receive(self, pipe: Connection) -> bytes:
        try:
            return pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise ClientProcessError("a client process of the load test crashed; see its message above") from error

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a process that still runs stops then
        for process in self._processes:
            process.join(STOP_LIMIT)
            if process.is_alive():
                process.kill()
                process.join()
