"""Processes that attack together: each part's requests are spread over them, and what they found is merged.

One process makes and sends several hundred requests a second, which keeps one core busy. `python -m
tests.attack.attackers` reads one job a line and answers each with one line, until its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import uvloop

from tests.attack import disconnects, fuzz, overload, raw_http
from tests.attack.canaries import READY, Canaries
from tests.attack.context import Attack
from tests.attack.findings import Findings, Part
from tests.attack.target import Target
from tests.attack.wire import Wire
from tests.support.paths import ROOT

MODULE = "tests.attack.attackers"
# The others are few requests, which need what only the first process has.
SPREAD: dict[str, Callable[[Attack], Awaitable[None]]] = {
    "fuzz": fuzz.run,
    "raw": raw_http.run,
    "disconnects": disconnects.run,
    "overload": overload.run,
}
MAX_LINE = 2**24  # bytes


@dataclass(frozen=True)
class Job:
    """One process's share of a part.

    Attributes:
        num_processes: that share the part.
    """

    host: str
    port: int
    document: dict[str, Any]
    model: str
    part: str
    seed: str
    num_requests: int
    seconds: float
    num_processes: int


@dataclass(frozen=True)
class Remote:
    """What these parts need of a target."""

    wire: Wire


@dataclass
class NeverExcused:
    """What these parts need of the canaries: nothing is stopped or killed meanwhile."""

    excused: bool = False


class Attackers:
    """Processes that wait for jobs."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def run(self, attack: Attack, part: str, seed: int) -> None:
        """Do a part together, and note in `attack` what was found."""
        count = len(self._processes)

        def job(index: int) -> Job:
            share = attack.num_requests // count + (index < attack.num_requests % count)
            return Job(
                *(attack.target.host, attack.target.port, attack.document, attack.model, part),
                *(f"{seed} {part} {index}", share, attack.end - time.monotonic(), count),
            )

        for found in await asyncio.gather(*(_ask(one, job(index)) for index, one in enumerate(self._processes))):
            if found is None:
                attack.part.unexpected["a process of the attack ended"] += 1
            else:
                add(attack.part, found)


async def _ask(process: asyncio.subprocess.Process, job: Job) -> Part | None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    return read_part(line) if line else None


@contextlib.asynccontextmanager
async def started(count: int) -> AsyncIterator[Attackers]:
    """So many, which are ready. Raises RuntimeError where one does not start."""
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE), stdin=pipe, stdout=pipe, cwd=ROOT, limit=MAX_LINE
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if await process.stdout.readline() != READY:
                raise RuntimeError("a process of the attack did not start")
        yield Attackers(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def add(part: Part, other: Part) -> None:
    """Count what another process found; its time is the same."""
    for each in fields(Part):
        if each.name not in ("seconds", "slowest_canary"):
            setattr(part, each.name, getattr(part, each.name) + getattr(other, each.name))


def read_part(line: bytes) -> Part:
    """A part from JSON, whose keys are all strings."""
    found = json.loads(line)
    statuses = Counter({int(status): count for status, count in found.pop("statuses").items()})
    counters = {name: Counter(value) for name, value in found.items() if isinstance(value, dict)}
    return Part(**{**found, **counters, "statuses": statuses})


async def carry_out(job: Job) -> Part:
    attack = Attack(
        cast(Target, Remote(Wire(job.host, job.port))),
        Findings(),
        cast(Canaries, NeverExcused()),
        job.document,
        job.model,
        random.Random(job.seed),
        job.num_requests,
        time.monotonic() + job.seconds,
        num_processes=job.num_processes,
    )
    try:
        await SPREAD[job.part](attack)
    except Exception as error:  # what has been found is told all the same
        attack.part.unexpected[f"the part ended with {error!r}"] += 1
    return attack.part


def main() -> None:
    print(READY.decode(), end="", flush=True)
    for line in sys.stdin:
        part = uvloop.run(carry_out(Job(**json.loads(line))))
        print(json.dumps(vars(part)), flush=True)  # asdict makes pairs of a Counter before Python 3.12


if __name__ == "__main__":
    main()
