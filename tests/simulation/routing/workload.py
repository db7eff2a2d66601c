"""Requests of a day's worst minutes: applications with system prompts, conversations that branch, agents, bursts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from tessera.app.routing.prefix_index import Key

BLOCK = 64  # tokens


@dataclass(frozen=True)
class Shape:
    """A workload; times in seconds, lengths in tokens.

    Attributes:
        rate: conversations that begin a second, on average.
        burst_factor: arrivals in a burst, relative to those outside; bursts take `burst` of every `burst_every`.
        num_applications: system prompts, of a popularity by Zipf's law.
        turns: mean of a conversation.
        branching: chance that a turn is an edit of an earlier one rather than the next.
        fan_out: chance that a turn is an agent's, which begins `fan_width` branches of its prefix at once.
    """

    rate: float = 300.0
    duration: float = 200.0
    burst_factor: float = 3.0
    burst: float = 15.0
    burst_every: float = 100.0
    num_applications: int = 300
    system_tokens: float = 1200.0
    user_tokens: float = 150.0
    completion_tokens: float = 220.0
    turns: float = 5.0
    think: float = 15.0
    branching: float = 0.15
    fan_out: float = 0.05
    fan_width: int = 8


@dataclass
class Turn:
    """One request.

    Attributes:
        keys: of the prompt's blocks; the completion's follow in `completion_keys`.
        steps: tokens of the completion.
    """

    keys: list[Key]
    completion_keys: list[Key]
    steps: int
    conversation: Conversation


@dataclass
class Conversation:
    """A tree of turns, of which each may go on from any before it."""

    root: list[Key]
    turns_left: int
    nodes: list[list[Key]] = field(default_factory=list)  # prompts with their completions


class Workload:
    """Draws conversations and their turns; equal seeds draw equal ones, whatever the replicas do.

    The draws of a conversation depend on its own seed, not on when its turns end.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self._num_keys = 0
        lengths = (self._blocks(self._random, shape.system_tokens) for _ in range(shape.num_applications))
        self._systems = [self._new_keys(length) for length in lengths]
        self._weights = [1.0 / (rank + 1) for rank in range(shape.num_applications)]

    def arrivals(self) -> list[float]:
        """Times at which conversations begin: a Poisson process with bursts."""
        shape, found, now = self.shape, list[float](), 0.0
        share = shape.burst / shape.burst_every
        quiet = shape.rate / (1 - share + share * shape.burst_factor)
        highest = quiet * shape.burst_factor
        while (now := now + self._random.expovariate(highest)) < shape.duration:
            is_burst = now % shape.burst_every < shape.burst
            if is_burst or self._random.random() < quiet / highest:
                found.append(now)
        return found

    def begin(self) -> tuple[Conversation, random.Random]:
        """A new conversation, and the source of its draws."""
        draws = random.Random(self._random.getrandbits(64))
        (root,) = draws.choices(self._systems, self._weights)
        turns = 1 + int(draws.expovariate(1.0) * (self.shape.turns - 1))
        return Conversation(root, turns), draws

    def next_turns(self, conversation: Conversation, draws: random.Random) -> list[Turn]:
        """The requests that are sent next, at once: one, an agent's several, or none at the end."""
        shape = self.shape
        if conversation.turns_left <= 0:
            return []
        conversation.turns_left -= 1
        nodes = conversation.nodes
        parent = conversation.root
        if nodes:
            parent = draws.choice(nodes) if draws.random() < shape.branching else nodes[-1]
        width = shape.fan_width if nodes and draws.random() < shape.fan_out else 1
        found = []
        for _ in range(width):
            keys = parent + self._new_keys(self._blocks(draws, shape.user_tokens))
            steps = max(1, int(draws.lognormvariate(math.log(shape.completion_tokens) - 0.32, 0.8)))
            completion = self._new_keys(steps // BLOCK)
            found.append(Turn(keys, completion, steps, conversation))
        nodes.append(found[-1].keys + found[-1].completion_keys)
        return found

    def _blocks(self, draws: random.Random, tokens: float) -> int:
        """A lognormal number of blocks with a mean of `tokens`, at least one."""
        return max(1, round(draws.lognormvariate(math.log(tokens) - 0.32, 0.8) / BLOCK))

    def _new_keys(self, number: int) -> list[Key]:
        first = self._num_keys
        self._num_keys += number
        return [key.to_bytes(8, "big") for key in range(first, first + number)]
