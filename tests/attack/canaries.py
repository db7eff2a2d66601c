"""Canaries: small requests of another key, with known answers and known quiet times, beside all attacks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.attack.findings import Part
from tests.attack.target import CANARY
from tests.attack.wire import Answer, NoAnswerError, Wire, request_bytes

PAUSE = 0.05  # seconds between two canaries
QUIET_ROUNDS = 7
LONG_PROMPT = 900  # tokens, about one step of the CPU's budget


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


class Canaries:
    """Sends canaries, one after the other, from a connection that is made anew when it breaks."""

    def __init__(self, wire: Wire, model: str) -> None:
        self._wire = wire
        self._canaries = make_canaries(model)
        self._long = json.dumps({"model": model, "prompt": "a b " * (LONG_PROMPT // 4), "max_tokens": 1}).encode()
        self.step_seconds = 0.0
        self.part = Part()
        self._stopped = False
        self.on_right: Callable[[float], object] = lambda multiple: None
        self.excused = False  # the attack has a process stopped or killed

    async def learn(self) -> None:
        """The answers and the quiet times, before any attack."""
        for canary in self._canaries:
            times = []
            for _ in range(QUIET_ROUNDS):
                begin = time.perf_counter()
                answer = await self._ask(canary.request)
                times.append(time.perf_counter() - begin)
                assert answer.status == 200, answer
                canary.answer = text_of(answer)
            canary.quiet_seconds = statistics.median(times)
        begin = time.perf_counter()
        await self._ask(request_bytes("POST", "/v1/completions", self._long, CANARY))
        self.step_seconds = time.perf_counter() - begin

    async def watch(self) -> None:
        """Until `stop`."""
        number = 0
        while not self._stopped:
            await self.send_one(number)
            number += 1
            await asyncio.sleep(PAUSE)

    @property
    def quiet(self) -> str:
        """The times that the slowest canary is held against."""
        times = [f"{one.name} {1000 * one.quiet_seconds:.1f} ms" for one in self._canaries]
        return ", ".join([*times, f"a step {1000 * self.step_seconds:.1f} ms"])

    @property
    def num_kinds(self) -> int:
        return len(self._canaries)

    def stop(self) -> None:
        """Let the canary that is under way be the last."""
        self._stopped = True

    async def send_one(self, number: int) -> None:
        """One canary, noted in the part that is current when it ends."""
        canary = self._canaries[number % len(self._canaries)]
        was_excused = self.excused
        begin = time.perf_counter()
        answer: Answer | None = None
        with contextlib.suppress(NoAnswerError, OSError):
            answer = await self._ask(canary.request)
        seconds = time.perf_counter() - begin
        part = self.part
        part.canaries += 1
        if was_excused or self.excused:
            wrong = answer is not None and answer.status == 200 and not canary.answer.startswith(_before_error(answer))
            part.excused_canaries += not wrong
            part.wrong_canaries += wrong
        elif answer is None or answer.status != 200:
            part.refused_canaries += 1
        elif text_of(answer) != canary.answer:
            part.wrong_canaries += 1
        else:
            multiple = (seconds - self.step_seconds) / canary.quiet_seconds
            part.slowest_canary = max(part.slowest_canary, multiple)
            self.on_right(seconds / canary.quiet_seconds)

    async def _ask(self, request: bytes) -> Answer:
        connection = await self._wire.connect()
        try:
            return await connection.ask(request)
        finally:
            connection.close()


def _before_error(answer: Answer) -> str:
    """The text that came before a stream broke off."""
    return text_of(answer).partition("error: ")[0]
