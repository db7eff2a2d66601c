"""Simulated HTTP requests: real generations and event streams, for clients that leave, read slowly or not at all."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Choice, Delta, Generation, TextOptions
from tessera.app.http.access_log import trace_of
from tessera.app.http.errors import ClientDisconnectedError
from tessera.app.http.streaming import EventStream, run_while_connected
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import EngineUnavailableError, RequestError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.client import EngineClient
from tests.simulation.drafts import make_prediction
from tests.simulation.processes import EOS, VOCAB_SIZE

if TYPE_CHECKING:
    from tests.simulation.history import History, World

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SETTINGS = AppSettings(
    model_folder="", served_model_names=("m",), stall_timeout=4.0, keepalive=1.0, request_timeout=60.0
)

DROPPED_AFTER = 8.0  # seconds in which a client reads nothing


def letter(token_id: int) -> str:
    return LETTERS[token_id % len(LETTERS)]


class Letters:
    """In place of a detokenizer: a letter for each token."""

    def decode_tokens(self, token_ids: list[int]) -> str:
        return "".join(map(letter, token_ids))

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Plan:
    """A request and its client's behaviour; times are seconds."""

    number: int
    at: float
    app: int
    prompt: list[int]
    max_tokens: int
    num_choices: int
    stops: tuple[str, ...]
    priority: int
    cache_salt: str
    streams: bool
    leaves_after: float | None
    reads_slowly: bool
    reads_nothing_after: int | None  # events


def make_plan(rng: random.Random, number: int, at: float, num_apps: int, prefixes: list[list[int]]) -> Plan:
    prefix = rng.choice(prefixes)
    tail = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
    return Plan(
        number=number,
        at=at,
        app=rng.randrange(num_apps),
        prompt=prefix[: rng.randint(0, len(prefix))] + tail,
        max_tokens=rng.choice((1, 3, 8, 24)),
        num_choices=rng.choice((1, 1, 1, 2, 3)),
        stops=tuple("".join(rng.choices(LETTERS, k=rng.randint(1, 2))) for _ in range(rng.choice((0, 0, 2)))),
        priority=rng.choice((0, 0, 0, -1, 1)),
        cache_salt=rng.choice(("", "alice", "bob")),
        streams=rng.random() < 0.7,
        leaves_after=rng.choice((0.0, 0.01, 0.1, 1.0)) if rng.random() < 0.25 else None,
        reads_slowly=rng.random() < 0.1,
        reads_nothing_after=rng.randint(0, 5) if rng.random() < 0.05 else None,
    )


def expected_tokens(plan: Plan, world: World) -> Iterator[int]:
    """Of each choice, up to its end token or -1; what stops do is left out."""
    context = list(plan.prompt)
    for _ in range(min(plan.max_tokens, world.context - len(plan.prompt))):
        token_id = world.say(context)
        yield token_id
        if token_id < 0 or token_id == EOS:
            return
        context.append(token_id)


def expected_answer(plan: Plan, world: World) -> tuple[str, str]:
    """The text of each choice and its finish reason, which is `error` for logits that are not finite."""
    text = ""
    for token_id in expected_tokens(plan, world):
        if token_id < 0:
            return text, "error"
        if token_id == EOS:
            return text, "stop"
        text += letter(token_id)
        places = [(text.find(stop), -len(stop)) for stop in plan.stops if stop in text]
        if places:
            return text[: min(places)[0]], "stop"
    return text, "length"


class Events:
    """In place of an API's events: keeps the deltas."""

    keepalive = b": still here\n\n"

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions
        self.error: RequestError | None = None
        self.is_closed = False

    def opening(self) -> bytes:
        return b"begin"

    def delta(self, delta: Delta) -> bytes:
        assert self.completions[delta.index].finish_reason is None, "a delta after the last"
        self.completions[delta.index].append_delta(delta)
        return b"delta"

    def closing(self) -> bytes:
        assert not self.is_closed
        self.is_closed = True
        return b"end"

    def failure(self, error: RequestError) -> bytes:
        assert self.error is None
        self.error = error
        return b"error"


@dataclass
class SimulatedRequest:
    """One request; `outcome` is set exactly once: completed, refused, failed, left, late or stalled."""

    history: History
    plan: Plan
    outcome: str | None = None
    completions: list[Completion] = field(default_factory=list)
    error: RequestError | None = None
    _dropped: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        plan, history = self.plan, self.history
        await asyncio.sleep(plan.at)
        client = history.clients[plan.app]
        self.completions = [Completion() for _ in range(plan.num_choices)]
        try:
            generation = self._submit(client)
        except EngineUnavailableError as error:
            self.error = error
            self._end("refused")
            return
        if plan.streams:
            await self._stream(generation)
        else:
            await self._whole(generation)

    def _submit(self, client: EngineClient) -> Generation:
        plan = self.plan
        world = self.history.world
        params = SamplingParams(max_tokens=plan.max_tokens)
        prediction = None
        if world.drafts is not None:
            answer = [token_id for token_id in expected_tokens(plan, world) if token_id >= 0]
            prediction = make_prediction(self.history.rng, answer)
        options = TextOptions(stops=plan.stops)
        choices = [Choice(index, Letters(), options) for index in range(plan.num_choices)]
        streams = client.submit_all(
            [(array("i", plan.prompt), params)] * plan.num_choices,
            priority=plan.priority,
            cache_salt=plan.cache_salt,
            num_choices=plan.num_choices,
            prediction=array("i", prediction) if prediction is not None else None,
        )
        return Generation(choices, streams, len(plan.prompt), plan.num_choices)

    async def _stream(self, generation: Generation) -> None:
        events = Events(self.completions)
        sent: list[str] = []
        stream = EventStream(generation, events, SETTINGS)
        num_sent = 0

        async def send(message: Any) -> None:
            nonlocal num_sent
            plan = self.plan
            num_sent += 1
            if plan.reads_nothing_after is not None and num_sent > plan.reads_nothing_after:
                await asyncio.sleep(DROPPED_AFTER)  # then the connection is closed, which no sender hears of
                self._dropped.set()
                return
            if plan.reads_slowly:
                await asyncio.sleep(self.history.rng.random())
            sent.append(message["type"])
            if not message.get("more_body", False) and message["type"] == "http.response.body":
                sent.append("end")

        scope: dict[str, Any] = {"type": "http", "state": {}, "headers": []}
        await stream(scope, self._receive, send)
        assert sent.count("http.response.start") <= 1
        assert sent.count("end") <= 1
        assert not sent or sent[0] == "http.response.start"
        assert "end" not in sent or sent[-1] == "end", "something was sent after the end"
        self.error = trace_of(scope).error
        if "end" in sent:
            self._end("completed" if events.is_closed else "failed")
        elif self.plan.leaves_after is not None:
            self._end("left")
        else:
            assert self.plan.reads_nothing_after is not None, "an answer has no end"
            self._end("stalled")

    async def _whole(self, generation: Generation) -> None:
        async def collect() -> None:
            async for delta in generation.deltas():
                self.completions[delta.index].append_delta(delta)

        try:
            await run_while_connected(self._receive, collect(), SETTINGS.request_timeout)
        except ClientDisconnectedError:
            self._end("left")
        except RequestError as error:
            self.error = error
            self._end("failed")
        else:
            self._end("completed")
        finally:
            await generation.abort()

    async def _receive(self) -> Any:
        if self.plan.leaves_after is None:
            await self._dropped.wait()
        else:
            await asyncio.sleep(self.plan.leaves_after)
        return {"type": "http.disconnect"}

    def _end(self, outcome: str) -> None:
        assert self.outcome is None, "a request ends once"
        self.outcome = outcome
        self.history.note("request", self.plan.number, outcome)
        text, reason = expected_answer(self.plan, self.history.world)
        for completion in self.completions:
            assert text.startswith(completion.text), (completion.text, text)
            if outcome == "completed":
                assert (completion.text, completion.finish_reason) == (text, reason)
        if outcome == "failed":
            assert self.error is not None
            is_late = self.error.status == 504
            assert not is_late or self.history.slow_steps, "an engine that died or hung was not noticed"
            allowed = self.error.status in (400, 429) or is_late or reason == "error"
            assert allowed or self.history.had_faults, f"failed for no reason: {self.error}"
