"""The choice of an engine: prefixes known, bounded and forgotten; cached tokens against load."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest

from tessera.app.routing.block_keys import MAX_BLOCKS, block_keys, split_keys
from tessera.app.routing.policy import RoutingPolicy
from tessera.app.routing.prefix_index import PrefixIndex
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.account import Account
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.sequence import Sequence
from tessera.engine.kv_tiers.prefix_report import MAX_CHANGES, PrefixReport
from tests.support.fakes.fake_client import INFO

ALL = 0b1111


def keys(text: str) -> list[bytes]:
    """A chain: each key stands for its letter and all before it."""
    return [text[: end + 1].encode() for end in range(len(text))]


def depths(index: PrefixIndex, text: str, replicas: int = ALL) -> dict[int, int]:
    """Number of keys that each replica has of a chain."""
    return {
        replica: depth
        for depth, group in index.matches(keys(text), replicas)
        for replica in range(group.bit_length())
        if group >> replica & 1
    }


def test_an_index_knows_each_replicas_longest_prefix() -> None:
    index = PrefixIndex(100)
    index.store(0, keys("abc"))
    index.store(1, keys("abxy"))
    index.store(3, keys("b"))
    assert depths(index, "abcd") == {0: 3, 1: 2, 2: 0, 3: 0}
    assert depths(index, "abxy", replicas=0b0110) == {1: 4, 2: 0}
    assert depths(index, "") == {0: 0, 1: 0, 2: 0, 3: 0}
    index.evict(0, keys("abc")[1:])
    assert depths(index, "abcd")[0] == 1
    index.evict(2, keys("abc"))
    index.clear(1)
    assert depths(index, "abxy") == {0: 1, 1: 0, 2: 0, 3: 0}
    assert len(index) == 2


def test_an_index_is_bounded_and_loses_the_longest_unused_ends_first() -> None:
    index = PrefixIndex(4)
    index.store(0, keys("abc"))
    index.store(0, keys("x"))
    index.store(0, keys("ab"))
    index.store(0, keys("z"))
    assert depths(index, "abc", 1) == {0: 2}, "the end of what was used least goes, not its beginning"
    assert depths(index, "z", 1) == depths(index, "x", 1) == {0: 1}
    index.set_capacity(1)
    assert len(index) == 1
    assert depths(index, "z", 1) == {0: 1}


def test_many_stores_leave_no_more_than_the_capacity() -> None:
    index = PrefixIndex(10)
    for number in range(1000):
        index.store(number % 3, keys(f"{number}+{number}"))
    assert len(index) == 30
    assert len(index._replicas) <= 30, "no key stays that no replica has"


def test_tokens_are_weighed_against_requests_under_way() -> None:
    index = PrefixIndex(1000)
    index.store(0, keys("a" * 32))
    policy = RoutingPolicy(index, block_size=16, tokens_per_request=256)
    prompt = keys("a" * 32)
    assert policy.choose(prompt, [0, 0, 0, 0], ALL) == 0
    assert policy.choose(prompt, [2, 0, 1, 1], ALL) == 0, "512 tokens are cached, which two requests are worth"
    assert policy.choose(prompt, [3, 1, 0, 1], ALL) == 2
    assert policy.choose(prompt, [0, 3, 2, 1], 0b1110) == 3, "0 cannot be chosen"
    assert policy.choose([], [3, 1, 2, 3], ALL) == 1


def test_a_choice_among_many_looks_at_a_few() -> None:
    index = PrefixIndex(1000)
    policy = RoutingPolicy(index, block_size=16, num_samples=2, random=random.Random(7))
    loads = [0.0] + [1.0] * 999
    chosen = [policy.choose([], loads, (1 << 1000) - 1) for _ in range(200)]
    assert chosen.count(0) < 10, "the idle one gets only what its two draws in a thousand bring"
    assert len(set(chosen)) > 100
    index.store(5, keys("abc"))
    assert policy.choose(keys("abc" + "x" * 40), loads, (1 << 1000) - 1) == 5


@pytest.mark.parametrize("short_rope_len", [0, 100])
def test_keys_are_those_that_engines_report(short_rope_len: int) -> None:
    info = msgspec.structs.replace(INFO, block_size=16, max_model_len=256, short_rope_len=short_rope_len)
    report = PrefixReport()
    blocks = BlockManager(10, 16, report=report)
    prompt = array("i", range(100, 165))
    params = SamplingParams(max_tokens=200)
    request = AddRequest("r", prompt, params, 0.0, cache_salt="a salt")
    (sequence,) = Sequence.from_request(
        request,
        b"",
        account=Account(0),
        eos_token_ids=(),
        max_context=256,
        short_rope_len=short_rope_len,
        arrival_number=0,
    )
    assert blocks.allocate(sequence, 65)
    blocks.publish(sequence, 65)
    expected = block_keys(prompt, params.max_tokens, "a salt", info)
    assert len(expected) == 4
    changes = report.take()
    assert split_keys(changes.stored) == expected
    assert changes.evicted == b""
    assert split_keys(report.take().stored) == []
    assert block_keys(prompt, params.max_tokens, "another", info)[0] != expected[0]
    blocks.release(sequence)
    blocks.reset()
    assert set(split_keys(report.take().evicted)) == set(expected)


def test_evictions_are_reported_but_for_what_a_tier_takes() -> None:
    report = PrefixReport()
    blocks = BlockManager(2, 16, report=report)
    for number in range(2):
        (sequence,) = Sequence.from_request(
            AddRequest("r", array("i", [number] * 33), SamplingParams(max_tokens=1), 0.0),
            b"",
            account=Account(0),
            eos_token_ids=(),
            max_context=256,
            arrival_number=0,
        )
        assert blocks.allocate(sequence, 32)
        blocks.publish(sequence, 32)
        blocks.release(sequence)
    changes = report.take()
    assert len(split_keys(changes.stored)) == len(split_keys(changes.evicted)) == 2
    assert not set(split_keys(changes.stored)) & set(split_keys(changes.evicted))


def test_reports_and_prompts_are_bounded() -> None:
    report = PrefixReport()
    for number in range(MAX_CHANGES + 5):
        report.note_stored(number.to_bytes(32, "big")[::-1])
    assert len(split_keys(report.take().stored)) == MAX_CHANGES
    long = array("i", [1]) * (INFO.block_size * (MAX_BLOCKS + 2))
    assert len(block_keys(long, 1, "", INFO)) == MAX_BLOCKS
