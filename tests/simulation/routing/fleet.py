"""A fleet of replicas behind a router, on virtual time, from a seed to its figures."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from tessera.app.routing.policy import TOKENS_PER_REQUEST, RoutingPolicy
from tessera.app.routing.prefix_index import Key, PrefixIndex
from tests.simulation.routing.replica import Asker, Machine, Replica, Work
from tests.simulation.routing.workload import BLOCK, Conversation, Shape, Turn, Workload

REPORT_INTERVAL = 0.5  # seconds between two reports of a replica's load
RETRY_DELAY = 1.0  # seconds after which a client sends a request again that a failure has ended
RESTART = 60.0  # seconds until a replica that failed is back, with an empty cache
WARM_UP = 0.2  # share of the history that is not counted

Choose: TypeAlias = Callable[[Sequence[Key], Sequence[float], int], int]


@dataclass(frozen=True)
class Fleet:
    """`failures`: of single replicas, in the whole history; `rack`: replicas that fail together in its middle."""

    num_replicas: int = 1000
    failures: int = 50
    rack: int = 20
    machine: Machine = field(default_factory=Machine)


class History:
    """One workload on one fleet with one policy.

    Args:
        policy: "round robin", "least loaded", "prefix alone" or "prefix and load".
    """

    def __init__(self, policy: str, shape: Shape, fleet: Fleet, seed: int) -> None:
        self._shape, self._fleet = shape, fleet
        self._workload = Workload(shape, seed)
        self._random = random.Random(seed + 1)
        self._replicas = [Replica(fleet.machine) for _ in range(fleet.num_replicas)]
        self._alive = (1 << fleet.num_replicas) - 1
        self._loads = [0.0] * fleet.num_replicas  # as last reported, and what was sent there since; infinite if gone
        self._index = PrefixIndex(fleet.machine.cache_blocks)
        self._choose = self._chooser(policy)
        self._next = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._due: list[float] = [math.inf] * fleet.num_replicas  # the event that each replica waits for
        self._seen: set[Key] = set()
        self.now = 0.0
        self.first_tokens: list[float] = []
        self.token_times: list[float] = []
        self.spread: list[float] = []
        self.num_cached = self.num_ideal = self.num_prompt = self.num_failed = 0

    def run(self) -> dict[str, float]:
        """-> figures; times in seconds."""
        for time in self._workload.arrivals():
            self._at(time, self._begin)
        for _ in range(self._fleet.failures):
            self._at(self._random.uniform(0, self._shape.duration), partial(self._fail, 1))
        self._at(self._shape.duration / 2, partial(self._fail, self._fleet.rack))
        self._at(REPORT_INTERVAL, self._report)
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self._figures()

    # -- events ---------------------------------------------------------------------------------

    def _at(self, time: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, act))

    def _begin(self) -> None:
        conversation, draws = self._workload.begin()
        self._ask(conversation, draws)

    def _ask(self, conversation: Conversation, draws: random.Random) -> None:
        turns = self._workload.next_turns(conversation, draws) if self.now < self._shape.duration else []
        asker = Asker(conversation, draws, len(turns))
        for turn in turns:
            self._send(turn, asker, self.now)

    def _send(self, turn: Turn, asker: Asker, arrival: float) -> None:
        """`arrival` is of the first try."""
        number = self._choose(turn.keys, self._loads, self._alive)
        self._loads[number] += 1
        ideal = 0
        for key in turn.keys:
            if key not in self._seen:
                break
            ideal += 1
        self._seen.update(turn.keys)
        work = Work(turn, asker, arrival, ideal)
        self._advance(number)
        self._replicas[number].submit(work)
        self._expect(number)

    def _advance(self, number: int) -> None:
        for work in self._replicas[number].advance(self.now):
            turn, asker = work.turn, work.asker
            self._seen.update(turn.completion_keys)
            if self._is_counted:
                self.first_tokens.append(work.first_token - work.arrival)
                self.token_times.append((work.end - work.first_token) / turn.steps)
                self.num_cached += work.num_cached
                self.num_ideal += work.num_ideal
                self.num_prompt += len(turn.keys)
            asker.num_open -= 1
            if asker.num_open == 0:
                pause = asker.draws.expovariate(1 / self._shape.think)
                self._at(self.now + pause, partial(self._ask, asker.conversation, asker.draws))

    def _expect(self, number: int) -> None:
        """Call again when the replica has something to do; an event that came to nothing only looks."""
        due = self._replicas[number].next_event
        if due < self._due[number]:
            self._due[number] = due
            self._at(due, partial(self._look, number, due))

    def _look(self, number: int, due: float) -> None:
        if self._due[number] != due:
            return
        self._due[number] = math.inf
        if self._replicas[number].next_event <= self.now + 1e-9:
            self._advance(number)
        self._expect(number)

    def _report(self) -> None:
        self._loads = [
            float(replica.load) if self._alive >> number & 1 else math.inf
            for number, replica in enumerate(self._replicas)
        ]
        if self._is_counted:
            alive = [load for load in self._loads if load < math.inf]
            self.spread.append(quantile(alive, 0.99) / (sum(alive) / len(alive)))
        if self.now < self._shape.duration:
            self._at(self.now + REPORT_INTERVAL, self._report)

    def _fail(self, number_of_replicas: int) -> None:
        for number in self._random.sample(range(self._fleet.num_replicas), number_of_replicas):
            self._alive &= ~(1 << number)
            self._loads[number] = math.inf
            self._index.clear(number)
            for work in self._replicas[number].restart(self.now):
                self.num_failed += 1
                self._at(self.now + RETRY_DELAY, partial(self._send, work.turn, work.asker, work.arrival))
            self._due[number] = math.inf
            self._at(self.now + RESTART, partial(self._return, number))

    def _return(self, number: int) -> None:
        self._alive |= 1 << number
        self._loads[number] = 0.0

    # -- policies -------------------------------------------------------------------------------

    def _chooser(self, policy: str) -> Choose:
        if policy == "round robin":
            return self._next_in_turn
        if policy == "least loaded":
            return self._least_loaded
        weight = {"prefix alone": 0.0, "prefix and load": TOKENS_PER_REQUEST}[policy]
        routing = RoutingPolicy(self._index, BLOCK, weight, random=self._random)

        def choose(keys: Sequence[Key], loads: Sequence[float], replicas: int) -> int:
            chosen = routing.choose(keys, loads, replicas)
            self._index.store(chosen, keys)
            return chosen

        return choose

    def _next_in_turn(self, keys: Sequence[Key], loads: Sequence[float], replicas: int) -> int:
        while True:
            self._next = (self._next + 1) % self._fleet.num_replicas
            if replicas >> self._next & 1:
                return self._next

    def _least_loaded(self, keys: Sequence[Key], loads: Sequence[float], replicas: int) -> int:
        """One of those with the least to do, drawn at random."""
        least = min(loads)
        return self._random.choice([number for number, load in enumerate(loads) if load == least])

    # -- figures --------------------------------------------------------------------------------

    @property
    def _is_counted(self) -> bool:
        return self.now >= WARM_UP * self._shape.duration

    def _figures(self) -> dict[str, float]:
        return {
            "requests": len(self.first_tokens),
            "failed": self.num_failed,
            "hit_rate": self.num_cached / self.num_prompt,
            "ideal_hit_rate": self.num_ideal / self.num_prompt,
            "share_of_ideal": self.num_cached / self.num_ideal,
            "spread": sum(self.spread) / len(self.spread),
            "ttft_p50": quantile(self.first_tokens, 0.5),
            "ttft_p99": quantile(self.first_tokens, 0.99),
            "ttft_p999": quantile(self.first_tokens, 0.999),
            "tpot_p99": quantile(self.token_times, 0.99),
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
