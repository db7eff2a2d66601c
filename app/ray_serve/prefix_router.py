"""Serve's router of requests to replicas, by the policy that a server uses for its engines.

A router knows the prompts that it has sent, in a bounded index, and of each replica what Serve knows: requests under
way, and the figures of `Replica.record_routing_stats`. Each front has a router of its own.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tessera.app.ray_serve.messages import CHUNK_TOKENS, HttpRequest
from tessera.app.routing.policy import TOKENS_PER_REQUEST, RoutingPolicy
from tessera.app.routing.prefix_index import Key, PrefixIndex

UNKNOWN_CACHE_TOKENS = 100_000  # of a replica that has reported nothing yet


class PrefixRouter(RequestRouter):
    """Sends a request where it costs least: what the replica has not cached, plus its load."""

    def initialize_state(self, tokens_per_request: float = TOKENS_PER_REQUEST) -> None:
        """`tokens_per_request`: see `RoutingPolicy`; from `request_router_kwargs`."""
        self._index = PrefixIndex(UNKNOWN_CACHE_TOKENS // CHUNK_TOKENS)
        self._policy = RoutingPolicy(self._index, CHUNK_TOKENS, tokens_per_request)
        self._numbers: dict[ReplicaID, int] = {}
        self._free: list[int] = []

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone, and take up what the others have reported."""
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        for replica_id in [known for known in self._numbers if known not in there]:
            self._forget(replica_id)
        sizes = [int(replica.routing_stats.get("cache_tokens", 0)) for replica in replicas]
        if any(sizes):
            self._index.set_capacity(max(sizes) // CHUNK_TOKENS)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica, then all others for when it is full."""
        if not candidate_replicas:
            return []
        replicas = {self._number(replica.replica_id): replica for replica in candidate_replicas}
        loads = [0.0] * (max(replicas) + 1)
        for number, replica in replicas.items():
            loads[number] = self._load(replica)
        keys = _keys(pending_request)
        chosen = self._policy.choose(keys, loads, sum(1 << number for number in replicas))
        self._index.store(chosen, keys)
        others = [replica for number, replica in replicas.items() if number != chosen]
        return [[replicas[chosen]], others] if others else [[replicas[chosen]]]

    def _load(self, replica: RunningReplica) -> float:
        """Requests under way, as Serve counts them, or as the replica last said where those are more."""
        under_way = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return float(max(under_way, replica.routing_stats.get("under_way", 0)))

    def _number(self, replica_id: ReplicaID) -> int:
        number = self._numbers.get(replica_id)
        if number is None:
            number = self._numbers[replica_id] = self._free.pop() if self._free else len(self._numbers)
        return number

    def _forget(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._index.clear(number)
            self._free.append(number)


def _keys(pending_request: PendingRequest | None) -> list[Key]:
    arguments: tuple[Any, ...] = tuple(pending_request.args) if pending_request is not None else ()
    return arguments[0].prefix_keys() if arguments and isinstance(arguments[0], HttpRequest) else []
