"""The choice of a replica: uncached tokens against requests under way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.app.routing.prefix_index import Key, PrefixIndex

TOKENS_PER_REQUEST = 256.0
NUM_SAMPLES = 8


@dataclass
class RoutingPolicy:
    """Sends a request where it costs least: tokens that the replica has not cached, plus its load in tokens.

    Of all replicas that have cached equally much, `num_samples` are looked at, drawn at random where there are more.
    So a choice takes no longer with a thousand replicas, and routers that do not know of each other's last choices do
    not all run to the same idle replica (Mitzenmacher, The power of two choices in randomized load balancing, 2001).

    Attributes:
        index: what replicas have cached; `choose` looks there, and notes nothing.
        block_size: tokens that a key stands for.
        tokens_per_request: tokens of prompt that are as dear to compute as one more request under way is. Larger
            spreads load, smaller keeps prefixes together.
        random: draws the replicas.
    """

    index: PrefixIndex
    block_size: int
    tokens_per_request: float = TOKENS_PER_REQUEST
    num_samples: int = NUM_SAMPLES
    random: random.Random = field(default_factory=random.Random)

    def choose(self, keys: Sequence[Key], loads: Sequence[float], replicas: int) -> int:
        """The replica for a prompt.

        Args:
            keys: of the prompt's full blocks, in order.
            loads: requests under way by replica; those of replicas that cannot be chosen do not matter.
            replicas: that can be chosen, as the bits of an integer; at least one.
        """
        assert replicas, "there is no replica to choose"
        best, best_cost = -1, float("inf")
        for depth, group in self.index.matches(keys, replicas):
            uncached = (len(keys) - depth) * self.block_size
            for replica in self._sample(group):
                cost = uncached + self.tokens_per_request * loads[replica]
                if cost <= best_cost:  # of equal ones the longer prefix
                    best, best_cost = replica, cost
        return best

    def _sample(self, group: int) -> list[int]:
        """At most `num_samples` of the group's replicas, in random order."""
        size, width = group.bit_count(), group.bit_length()
        if size * size > self.num_samples * width:  # drawing in vain costs less than a list of a large group
            drawn: dict[int, None] = {}
            while len(drawn) < min(self.num_samples, size):
                replica = self.random.randrange(width)
                if group >> replica & 1:
                    drawn[replica] = None
            return list(drawn)
        members = []
        while group:
            lowest = group & -group
            members.append(lowest.bit_length() - 1)
            group ^= lowest
        return self.random.sample(members, min(self.num_samples, size))
