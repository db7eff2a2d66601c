"""What all parts of an attack have in common."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.attack.canaries import Canaries
from tests.attack.findings import Findings, Part
from tests.attack.target import ATTACKER, Target
from tests.attack.wire import Answer, Connection, NoAnswerError, request_bytes

NUM_CONNECTIONS = 16
LEAST_CONNECTIONS = 6  # of each process, where several attack together: most of the time one waits for an answer


@dataclass
class Attack:
    """One part under way: it sends until `num_requests` are sent or the time is over."""

    target: Target
    findings: Findings
    canaries: Canaries
    document: dict[str, Any]
    model: str
    rng: random.Random
    num_requests: int
    end: float  # time.monotonic()
    part: Part = field(default_factory=Part)
    own_kills: int = 0  # engines that the attack has killed itself
    rate: float = math.inf  # requests per second at most, where a part sends them one at a time
    num_processes: int = 1  # that do this part together
    _next: float = 0.0  # time.monotonic() of the next request

    @property
    def is_over(self) -> bool:
        return self.part.requests >= self.num_requests or time.monotonic() >= self.end

    def own_share(self, number: int, least: int = 1) -> int:
        """Of so many clients, those of this process."""
        return number if self.num_processes == 1 else max(-(-number // self.num_processes), least)

    async def is_due(self) -> bool:
        """Wait until `rate` allows one more request; False if the part is over."""
        now = time.monotonic()
        begin, self._next = self._next, max(self._next, now) + 1 / self.rate
        await asyncio.sleep(min(begin, self.end) - now)
        return not self.is_over

    def note(self, what: str, answer: Answer | None) -> None:
        """Count a request and its answer, None for none."""
        part = self.part
        part.requests += 1
        if answer is None:
            part.unanswered += 1
            return
        part.statuses[answer.status] += 1
        excused = self.canaries.excused and b'"engine_died"' in answer.body
        if answer.is_faulty and not excused:
            part.faulty[f"{answer.status} {what}"] += 1

    async def connect(self) -> Connection | None:
        """None where the server takes no more."""
        with contextlib.suppress(OSError):
            return await self.target.wire.connect()
        return None

    async def ask(self, what: str, method: str, path: str, body: bytes, *, key: str = ATTACKER) -> Answer | None:
        """One request on a connection of its own."""
        connection = await self.connect()
        answer = None
        if connection is not None:
            with contextlib.suppress(NoAnswerError):
                answer = await connection.ask(request_bytes(method, path, body, key))
            connection.close()
        self.note(what, answer)
        return answer

    async def crowd(
        self, send: Callable[[Connection], Awaitable[None]], num_connections: int = NUM_CONNECTIONS
    ) -> None:
        """Send with several kept connections at a time, until the part is over."""

        async def one() -> None:
            while not self.is_over:
                async with self._kept() as connection:
                    while connection is not None and connection.is_open and await self.is_due():
                        await send(connection)

        await asyncio.gather(*(one() for _ in range(self.own_share(num_connections, LEAST_CONNECTIONS))))

    @contextlib.asynccontextmanager
    async def _kept(self) -> AsyncIterator[Connection | None]:
        connection = await self.connect()
        if connection is None:
            await asyncio.sleep(0.05)
        try:
            yield connection
        finally:
            if connection is not None:
                connection.close()
