"""A replica as a queue: prompts computed one after the other, decodes that share its steps, a bounded prefix cache."""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from dataclasses import dataclass

from tessera.app.routing.prefix_index import Key
from tests.simulation.routing.workload import BLOCK, Conversation, Turn


@dataclass(frozen=True)
class Machine:
    """What a replica can do: about a 70B model in bfloat16 on two GPUs of H200's kind; times in seconds.

    Attributes:
        prefill_rate: tokens of prompts a second.
        step, step_per_sequence: the time of a decode step is `step + step_per_sequence * sequences`.
        cache_blocks: of the prefix cache, 64 tokens each.
    """

    prefill_rate: float = 5000.0
    prefill_overhead: float = 0.03
    step: float = 0.022
    step_per_sequence: float = 0.0004
    max_sequences: int = 128
    cache_blocks: int = 5000


@dataclass
class Asker:
    """A conversation that waits for `num_open` turns."""

    conversation: Conversation
    draws: random.Random
    num_open: int


@dataclass(eq=False)
class Work:
    """A turn at a replica; times in seconds, and of the prompt's blocks those cached there and those known anywhere."""

    turn: Turn
    asker: Asker
    arrival: float
    num_ideal: int
    num_cached: int = 0
    first_token: float = 0.0
    end: float = 0.0


class Replica:
    """Call `advance(now)` before anything else at a time; `next_event` is when to call it again."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._now = self._steps = 0.0
        self._waiting: deque[Work] = deque()  # the first is being computed if `_prefill_end` is finite
        self._prefill_end = math.inf
        self._decoding: list[tuple[float, int, Work]] = []  # by the step at which they end
        self._num_works = 0
        self._cache: OrderedDict[Key, None] = OrderedDict()

    def restart(self, now: float) -> list[Work]:
        """Lose everything; -> what was under way."""
        lost = [*self._waiting, *(work for _, _, work in self._decoding)]
        self._now = now
        self._prefill_end = math.inf
        for held in (self._waiting, self._decoding, self._cache):
            held.clear()
        return lost

    @property
    def load(self) -> int:
        """Requests under way."""
        return len(self._waiting) + len(self._decoding)

    @property
    def next_event(self) -> float:
        """When a prompt or a completion is done; infinite if nothing is under way."""
        if not self._decoding:
            return self._prefill_end
        steps = max(self._decoding[0][0] - self._steps, 0.0)
        return min(self._prefill_end, self._now + self._step_time() * steps)

    def submit(self, work: Work) -> None:
        self._waiting.append(work)
        self._begin_prefill()

    def advance(self, now: float) -> list[Work]:
        """Up to `now`, which is at most `next_event`; -> what has ended."""
        self._steps += (now - self._now) / self._step_time()
        self._now = now
        ended = []
        while self._decoding and self._decoding[0][0] <= self._steps + 1e-6:
            work = heapq.heappop(self._decoding)[2]
            work.end = now
            self._store(work.turn.completion_keys)
            ended.append(work)
        if self._prefill_end <= now + 1e-9:
            work = self._waiting.popleft()
            self._prefill_end = math.inf
            work.first_token = now
            self._store(work.turn.keys)
            self._num_works += 1
            heapq.heappush(self._decoding, (self._steps + work.turn.steps, self._num_works, work))
        self._begin_prefill()
        return ended

    def _step_time(self) -> float:
        return self._machine.step + self._machine.step_per_sequence * len(self._decoding)

    def _begin_prefill(self) -> None:
        if not self._waiting or self._prefill_end < math.inf or len(self._decoding) >= self._machine.max_sequences:
            return
        work = self._waiting[0]
        work.num_cached = 0
        for key in work.turn.keys:
            if key not in self._cache:
                break
            work.num_cached += 1
        uncached = (len(work.turn.keys) - work.num_cached) * BLOCK
        self._prefill_end = self._now + self._machine.prefill_overhead + uncached / self._machine.prefill_rate

    def _store(self, keys: list[Key]) -> None:
        cache = self._cache
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > self._machine.cache_blocks:
            cache.popitem(last=False)
