"""The simulated fleet, small: a seed is a history, prefixes are found, load is balanced, failures lose nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.simulation.routing.fleet import Fleet, History
from tests.simulation.routing.replica import Asker, Machine, Replica, Work
from tests.simulation.routing.workload import Conversation, Shape, Turn, Workload

SHAPE = replace(Shape(), rate=9.0, duration=60.0, num_applications=30, think=5.0, burst_every=30.0)
FLEET = Fleet(num_replicas=30, failures=3, rack=2)
SEED = 5


def figures(policy: str) -> dict[str, float]:
    return History(policy, SHAPE, replace(FLEET, failures=0, rack=0), SEED).run()


def test_a_seed_is_a_history() -> None:
    first, again, other = (
        History("prefix and load", replace(SHAPE, duration=15.0), FLEET, seed).run() for seed in (SEED, SEED, SEED + 1)
    )
    assert first == again != other


def test_prefix_and_load_finds_what_is_cached_without_piling_up() -> None:
    ours, blind, least, alone = map(figures, ("prefix and load", "round robin", "least loaded", "prefix alone"))
    assert ours["share_of_ideal"] >= 0.9, f"seed {SEED}"
    assert max(blind["share_of_ideal"], least["share_of_ideal"]) < 0.7
    assert ours["ttft_p99"] < min(blind["ttft_p99"], least["ttft_p99"])
    assert ours["spread"] < alone["spread"]


def test_every_request_ends_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Turn] = []
    begin = Workload.next_turns

    def note(self: Workload, *arguments: object) -> list[Turn]:
        turns = begin(self, *arguments)  # type: ignore[arg-type]
        sent.extend(turns)
        return turns

    monkeypatch.setattr(Workload, "next_turns", note)
    monkeypatch.setattr("tests.simulation.routing.fleet.WARM_UP", 0.0)
    found = History("prefix and load", replace(SHAPE, duration=15.0), replace(FLEET, failures=10), SEED).run()
    assert found["failed"] > 0
    assert found["requests"] == len(sent)


def test_a_replica_computes_what_it_has_not_cached() -> None:
    machine = Machine(prefill_rate=64.0, prefill_overhead=0.0, step=1.0, step_per_sequence=0.0)
    replica = Replica(machine)
    keys = [number.to_bytes(8, "big") for number in range(4)]
    conversation = Conversation([], 1)

    def work(number_of_blocks: int) -> Work:
        turn = Turn(keys[:number_of_blocks], [], 2, conversation)
        return Work(turn, Asker(conversation, random.Random(0), 1), 0.0, 0)

    first, second = work(3), work(4)
    replica.submit(first)
    replica.submit(second)
    assert replica.load == 2
    times = []
    while replica.load:
        times.append(replica.next_event)
        replica.advance(times[-1])
    assert (first.first_token, first.end) == (3.0, 5.0)
    assert (second.first_token, second.end, second.num_cached) == (4.0, 6.0, 3)
    assert replica.restart(7.0) == []
