"""Canaries: small requests of another key, with known answers and known quiet times, beside all attacks.

`python -m tests.attack.canaries HOST PORT ADMIN_PORT MODEL` sends them from a process of its own, until SIGTERM:
among the attack's requests they would wait for their turn, and it would seem the server's time. It asks the admin port
as well, unless that is 0. One JSON line tells of each answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from tests.attack.findings import Part
from tests.attack.kv_cache import random_prompt
from tests.attack.machine import withheld
from tests.attack.target import CANARY
from tests.attack.wire import Answer, NoAnswerError, Wire, request_bytes
from tests.support.paths import ROOT

MODULE = "tests.attack.canaries"
READY = b"ready\n"
ADMIN_PATHS = ("/health", "/metrics", "/ready")
ADMIN_PAUSE = 0.25  # seconds

PAUSE = 0.05  # seconds between two canaries
QUIET_ROUNDS = 7
LATE, LATE_ADMIN = 5.0, 0.3  # times its quiet time, and seconds, from which on an answer is told of
FULL_STEP = 1024  # tokens, the CPU's budget of a step


@dataclass
class Canary:
    name: str
    request: bytes
    answer: str = ""
    quiet_seconds: float = 0.0


def text_of(answer: Answer) -> str:
    """What the model said, of a whole or a streamed response."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: {")]
        return "".join(_text(json.loads(event)) for event in events)
    return _text(json.loads(answer.body))


def _text(found: Any) -> str:
    if "error" in found:
        return f"error: {found['error']}"
    pieces = []
    for choice in found.get("choices", ()):
        message = choice.get("message") or choice.get("delta") or choice
        pieces.append(str(message.get("text") or message.get("content") or ""))
    return "".join(pieces)


def make_canaries(model: str) -> list[Canary]:
    common = {"model": model, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    bodies = {
        "completion": ("/v1/completions", {**common, "prompt": "Once upon a time"}),
        "stream": ("/v1/completions", {**common, "prompt": "The sun and the moon", "stream": True}),
        "chat": ("/v1/chat/completions", {**common, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}),
    }
    return [
        Canary(name, request_bytes("POST", path, json.dumps(body).encode(), CANARY))
        for name, (path, body) in bodies.items()
    ]


@dataclass(frozen=True)
class Sent:
    """What became of one canary, or of one question to the admin port; times are of time.monotonic().

    Attributes:
        number: which canary; None for the admin port.
        status: None without an answer.
        text: what the model said, or the path of the admin port.
        stolen, throttled: seconds that the machine withheld meanwhile, see `withheld`.
    """

    number: int | None
    begin: float
    end: float
    status: int | None = None
    text: str = ""
    stolen: float = 0.0
    throttled: float = 0.0

    @property
    def withheld(self) -> str:
        """The time that the machine withheld, as the end of a line about a late answer."""
        parts = (("stolen from the machine", self.stolen), ("throttled by a quota", self.throttled))
        return "".join(f", {1000 * seconds:.0f} ms {what}" for what, seconds in parts if seconds)


class Canaries:
    """Has canaries sent, one after the other, each from a connection of its own, and judges their answers."""

    def __init__(self, wire: Wire, model: str, admin_port: int | None = None) -> None:
        self._wire = wire
        self._admin_port = admin_port
        self._model = model
        self._canaries = make_canaries(model)
        full_step = {"model": model, "prompt": random_prompt(random.Random(0), FULL_STEP), "max_tokens": 1}
        self._full_step = json.dumps(full_step).encode()
        self._process: asyncio.subprocess.Process | None = None
        self._excused_until = -math.inf  # time.monotonic()
        self.step_seconds = 0.0
        self.slowest_admin = 0.0
        self.part = Part()
        self.on_right: Callable[[float], object] = lambda multiple: None
        self.on_late: Callable[[str], object] = lambda line: None

    async def learn(self) -> None:
        """The answers and the quiet times, before any attack."""
        for number, canary in enumerate(self._canaries):
            times = []
            for _ in range(QUIET_ROUNDS):
                sent = await send(self._wire, self._canaries, number)
                times.append(sent.end - sent.begin)
                assert sent.status == 200, sent
                canary.answer = sent.text
            canary.quiet_seconds = statistics.median(times)
        begin = time.perf_counter()
        await _ask(self._wire, request_bytes("POST", "/v1/completions", self._full_step, CANARY))
        self.step_seconds = time.perf_counter() - begin

    async def start(self) -> None:
        """Begin to send. Raises RuntimeError where that process does not start."""
        arguments = (self._wire.host, str(self._wire.port), str(self._admin_port or 0), self._model)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, *arguments),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # the attack's session gives way
        )
        assert self._process.stdout is not None
        if await self._process.stdout.readline() != READY:
            raise RuntimeError("the canaries' process did not start")

    async def watch(self) -> None:
        """Note what was sent, until `stop`."""
        assert self._process is not None, "they have been started"
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            sent = Sent(**json.loads(line))
            if sent.number is None:
                seconds = sent.end - sent.begin
                self.slowest_admin = max(self.slowest_admin, seconds)
                if seconds > LATE_ADMIN:
                    self.on_late(f"{sent.text} of the admin port: {1000 * seconds:.0f} ms{sent.withheld}")
            else:
                self._judge(sent, sent.number)
        await self._process.wait()

    def stop(self) -> None:
        """Let the canary that is under way be the last."""
        assert self._process is not None, "they have been started"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    @property
    def quiet(self) -> str:
        """The times that the slowest canary is held against."""
        times = [f"{one.name} {1000 * one.quiet_seconds:.1f} ms" for one in self._canaries]
        return ", ".join([*times, f"a step {1000 * self.step_seconds:.1f} ms"])

    @property
    def num_kinds(self) -> int:
        return len(self._canaries)

    @property
    def excused(self) -> bool:
        """The attack has a process stopped or killed."""
        return self._excused_until == math.inf

    @excused.setter
    def excused(self, excused: bool) -> None:
        self._excused_until = math.inf if excused else time.monotonic()

    async def send_one(self, number: int) -> None:
        """One canary, from this process, in which it may wait for the attack's own work."""
        self._judge(await send(self._wire, self._canaries, number), number, by_time=False)

    def _judge(self, sent: Sent, number: int, *, by_time: bool = True) -> None:
        """Note a canary in the part that is current when its end is known."""
        canary, part = self._canaries[number], self.part
        part.canaries += 1
        if sent.begin < self._excused_until:
            wrong = sent.status == 200 and not canary.answer.startswith(sent.text.partition("error: ")[0])
            part.excused_canaries += not wrong
            part.wrong_canaries += wrong
        elif sent.status != 200:
            part.refused_canaries += 1
            self.on_late(f"{canary.name}: no answer" if sent.status is None else f"{canary.name}: status {sent.status}")
        elif sent.text != canary.answer:
            part.wrong_canaries += 1
        elif by_time:
            seconds = sent.end - sent.begin
            multiple = (seconds - self.step_seconds) / canary.quiet_seconds
            part.slowest_canary = max(part.slowest_canary, multiple)
            if multiple > LATE:
                late = f"{canary.name}: {1000 * seconds:.0f} ms, {multiple:.1f} times its quiet time"
                self.on_late(late + sent.withheld)
            self.on_right(seconds / canary.quiet_seconds)


async def send(wire: Wire, canaries: list[Canary], number: int) -> Sent:
    """One canary, from a connection of its own."""
    before = withheld()
    begin = time.monotonic()
    answer: Answer | None = None
    with contextlib.suppress(NoAnswerError, OSError):
        answer = await _ask(wire, canaries[number].request)
    end = time.monotonic()
    stolen, throttled = (now - then for now, then in zip(withheld(), before, strict=True))
    status = None if answer is None else answer.status
    text = text_of(answer) if answer is not None and status == 200 else ""
    return Sent(number, begin, end, status, text, stolen, throttled)


async def _ask(wire: Wire, request: bytes) -> Answer:
    connection = await wire.connect()
    try:
        return await connection.ask(request)
    finally:
        connection.close()


async def _send_all(wire: Wire, model: str, is_over: asyncio.Event) -> None:
    canaries = make_canaries(model)
    for number in itertools.cycle(range(len(canaries))):
        if is_over.is_set():
            return
        _tell(await send(wire, canaries, number))
        await asyncio.sleep(PAUSE)


async def _ask_admin(admin: Wire, is_over: asyncio.Event) -> None:
    for path in itertools.cycle(ADMIN_PATHS):
        if is_over.is_set():
            return
        begin = time.monotonic()
        with contextlib.suppress(NoAnswerError, OSError):  # the server's end is counted elsewhere
            await admin.get(path)
        _tell(Sent(None, begin, time.monotonic(), text=path))
        await asyncio.sleep(ADMIN_PAUSE)


def _tell(sent: Sent) -> None:
    print(json.dumps(asdict(sent)), flush=True)


async def main(host: str, port: int, admin_port: int, model: str) -> None:
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    print(READY.decode(), end="", flush=True)
    senders = [_send_all(Wire(host, port), model, is_over)]
    if admin_port:
        senders.append(_ask_admin(Wire(host, admin_port), is_over))
    with contextlib.suppress(BrokenPipeError):
        await asyncio.gather(*senders)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
