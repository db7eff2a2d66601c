"""Blocks are shared only when their content is equal, evicted oldest first, and never lost."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from tessera.engine.core.account import Account
from tessera.engine.core.block_manager import BlockManager
from tessera.engine.speculation.draft_keys import DraftKeys
from tests.engine.core.blocks import BLOCK_SIZE, Report, make_sequence, num_hits, start, tokens


def test_an_allocation_is_whole_or_nothing() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    sequence = make_sequence(tokens(5))
    assert not manager.allocate(sequence, 17)
    assert sequence.block_table == []
    assert manager.num_available_blocks == 4
    assert manager.allocate(sequence, 5)
    assert len(sequence.block_table) == 2
    assert manager.allocate(sequence, 16)
    assert sorted(sequence.block_table) == [0, 1, 2, 3]
    manager.release(sequence)
    assert manager.num_available_blocks == 4


def test_a_prefix_is_found_up_to_its_last_equal_full_block() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    first, _ = start(manager, [*tokens(3), 50, 51])
    assert num_hits(manager, [*tokens(3), 60]) == 3
    assert num_hits(manager, [*tokens(2), 90, 91, 92, 93, 94]) == 2
    assert num_hits(manager, tokens(3, first=1)) == 0
    second, hits = start(manager, [*tokens(3), 60])
    assert hits == 3
    assert second.block_table[:3] == first.block_table[:3]
    assert second.block_table[3] != first.block_table[3], "a partial block is never shared"


def test_the_last_token_is_always_left_to_compute() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    start(manager, tokens(3))
    assert num_hits(manager, tokens(3)) == 2
    assert num_hits(manager, [*tokens(3), 1]) == 3


def test_equal_blocks_at_another_place_are_not_a_hit() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    start(manager, [*tokens(1), *tokens(1), *tokens(1), 9])
    assert num_hits(manager, [*tokens(1), 9]) == 1
    assert num_hits(manager, [*tokens(1, first=40), *tokens(1), 9]) == 0


def test_uncomputed_blocks_are_not_shared() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    sequence = make_sequence(tokens(4))
    assert manager.allocate(sequence, 16)
    manager.publish(sequence, 7)
    assert num_hits(manager, [*tokens(4), 9]) == 1


def test_fault_tenant_isolation_two_salts_never_share() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    first, _ = start(manager, tokens(2), b"alice")
    assert num_hits(manager, [*tokens(2), 9], b"bob") == 0
    assert num_hits(manager, [*tokens(2), 9]) == 0
    second, _ = start(manager, tokens(2), b"bob")
    assert not set(first.block_table) & set(second.block_table)
    assert num_hits(manager, [*tokens(2), 9], b"alice") == 2


def test_fault_tenant_isolation_the_hash_chain_is_sha256_with_the_salt_at_the_root() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    sequence, _ = start(manager, tokens(2), b"salt")
    expected = hashlib.sha256(b"salt").digest()
    for index in range(2):
        content = array("i", sequence.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]).tobytes()
        expected = hashlib.sha256(expected + content).digest()
        assert sequence.block_digests[index] == expected


def test_a_hash_collision_is_no_hit() -> None:
    manager = BlockManager(32, BLOCK_SIZE, digest=lambda data: b"same")
    start(manager, tokens(1))
    assert num_hits(manager, [*tokens(1), 9]) == 1
    assert num_hits(manager, [*tokens(1, first=40), 9]) == 0, "other tokens"
    assert num_hits(manager, [*tokens(1), 9], b"bob") == 0, "other salt"
    start(manager, [*tokens(1), *tokens(1)])
    assert num_hits(manager, [*tokens(1, first=40), *tokens(1), 9]) == 0, "other prefix"


def test_eviction_takes_the_least_recently_released_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    old, _ = start(manager, tokens(2))
    new, _ = start(manager, tokens(2, first=40))
    expected = [old.block_table[1], old.block_table[0], new.block_table[1], new.block_table[0]]
    manager.release(old)
    manager.release(new)
    assert list(manager.cached_blocks) == expected
    taker = make_sequence(tokens(6, first=80))
    assert manager.allocate(taker, 2 * BLOCK_SIZE)
    assert list(manager.cached_blocks) == expected, "blocks that hold nothing go first"
    assert manager.allocate(taker, 3 * BLOCK_SIZE)
    assert num_hits(manager, [*tokens(2), 9]) == 1
    assert manager.allocate(taker, 5 * BLOCK_SIZE)
    assert num_hits(manager, [*tokens(2), 9]) == 0
    assert num_hits(manager, [*tokens(2, first=40), 9]) == 1
    assert taker.block_table[2:] == expected[:3]


def test_a_hit_renews_a_block() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    for first in (0, 40):
        manager.release(start(manager, tokens(1, first))[0])
    again, hits = start(manager, [*tokens(1), 9])
    assert hits == 1
    manager.release(again)
    taker = make_sequence(tokens(3, first=80))
    assert manager.allocate(taker, 3 * BLOCK_SIZE)
    assert num_hits(manager, [*tokens(1), 9]) == 1
    assert num_hits(manager, [*tokens(1, first=40), 9]) == 0


def test_equal_prefixes_computed_at_the_same_time_end_up_shared() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    first, second = make_sequence([*tokens(2), 50]), make_sequence([*tokens(2), 60])
    for sequence in (first, second):
        assert manager.match_prefix(sequence) == []
        assert manager.allocate(sequence, 9)
    own_tail = second.block_table[2]
    manager.publish(first, 9)
    manager.publish(second, 9)
    assert second.block_table == [*first.block_table[:2], own_tail]
    assert manager.num_used_blocks == 4
    manager.release(first)
    assert manager.num_used_blocks == 3, "what the second still reads stays"
    manager.release(second)
    assert manager.num_used_blocks == 0
    assert len(manager.cached_blocks) == 2


def test_withdrawn_blocks_are_never_shared_again_nor_what_came_after_them() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    failing, _ = start(manager, [*tokens(2), 50])
    follower, hits = start(manager, [*tokens(2), 60, 61, 62, 63, 64])
    assert hits == 2
    manager.release(failing, withdraw=True)
    assert num_hits(manager, [*tokens(2), 9]) == 0
    follower.token_ids.extend([65, 66, 67, 68])
    assert manager.allocate(follower, 17)
    manager.publish(follower, 17)
    assert num_hits(manager, follower.token_ids.tolist()) == 0
    again, _ = start(manager, follower.token_ids.tolist())
    assert not set(again.block_table) & set(follower.block_table)
    assert num_hits(manager, follower.token_ids.tolist()) == 4, "computed anew it may be shared"
    manager.release(follower)
    manager.release(again)
    assert manager.num_used_blocks == 0


def test_who_shared_a_withdrawn_block_does_not_publish_it_again() -> None:
    manager = BlockManager(16, BLOCK_SIZE)
    failing, _ = start(manager, [*tokens(2), 50])
    follower = make_sequence([*tokens(2), 60, 61, 62, 63, 64])
    manager.share(follower, manager.match_prefix(follower))
    assert follower.block_table == failing.block_table[:2]
    manager.release(failing, withdraw=True)
    assert manager.allocate(follower, 13)
    manager.publish(follower, 13)
    assert not any(manager.is_published(block) for block in follower.block_table)
    manager.release(follower)
    assert len(manager.free_blocks) == 16


def test_a_failing_sequence_withdraws_blocks_that_wait_in_the_cache() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    manager.release(start(manager, [*tokens(2), 50])[0])
    failing, hits = start(manager, [*tokens(2), 50])
    assert hits == 2
    manager.release(failing, withdraw=True)
    assert len(manager.free_blocks) == 8


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = BlockManager(8, BLOCK_SIZE, prefix_caching=False)
    sequence, _ = start(manager, tokens(3))
    assert num_hits(manager, tokens(3)) == 0
    manager.release(sequence)
    assert len(manager.free_blocks) == 8


def test_revived_blocks_count_as_taken() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    manager.release(start(manager, tokens(3))[0])
    shared = manager.match_prefix(make_sequence([*tokens(3), 9]))
    assert len(shared) == 3
    assert manager.fits(16, shared, spare=0)
    assert not manager.fits(16, shared, spare=1)
    assert not manager.fits(17, shared, spare=0)


def test_blocks_that_are_published_one_by_one_are_one_prefix() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    sequence = make_sequence(tokens(4))
    assert manager.allocate(sequence, 16)
    for num_computed in (4, 8, 12, 16):
        manager.publish(sequence, num_computed)
        assert num_hits(manager, [*tokens(4), 0]) == num_computed // BLOCK_SIZE


@pytest.mark.parametrize("num_published", [1, 2])
def test_after_a_reset_nothing_is_found_and_what_runs_publishes_nothing_behind_it(num_published: int) -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    ended, _ = start(manager, tokens(2))
    manager.release(ended)
    running = make_sequence(tokens(4, 100))
    assert manager.allocate(running, 16)
    manager.publish(running, num_published * BLOCK_SIZE)
    manager.reset()
    assert not manager.cached_blocks
    assert len(manager.free_blocks) == 2
    assert num_hits(manager, [*tokens(2), 0]) == 0
    manager.publish(running, 16)
    assert not any(manager.is_published(block) for block in running.block_table)
    manager.release(running)
    assert len(manager.free_blocks) == 6


def test_a_block_whose_parent_is_gone_is_free_once_its_content_is_published_again() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    whole, _ = start(manager, tokens(2))
    beginning, _ = start(manager, [*tokens(1), 0])
    orphan = whole.block_table[1]
    manager.release(beginning, withdraw=True)
    manager.release(whole)
    assert list(manager.cached_blocks) == [orphan]
    again, num_found = start(manager, tokens(2))
    assert num_found == 0
    assert orphan in manager.free_blocks
    assert num_hits(manager, [*tokens(2), 0]) == 2
    manager.release(again)
    assert len(manager.free_blocks) + len(manager.cached_blocks) == 6


# ---- what others hear of it ---------------------------------------------------------------------


def test_a_report_hears_of_every_block_that_can_be_found_and_of_its_end() -> None:
    report = Report()
    manager = BlockManager(3, BLOCK_SIZE, report=report)
    first, _ = start(manager, tokens(2))
    stored = [("stored", digest) for digest in first.block_digests]
    assert report.changes == stored
    follower, _ = start(manager, [*tokens(2), 9])
    assert report.changes == stored, "it was there already"
    manager.release(first)
    manager.release(follower)
    taker = make_sequence(tokens(2, first=80))
    assert manager.allocate(taker, 2 * BLOCK_SIZE)
    assert report.changes == [*stored, ("evicted", first.block_digests[1])]
    manager.publish(taker, 8)
    manager.release(taker, withdraw=True)
    gone = [("evicted", digest) for digest in reversed(taker.block_digests)]
    assert report.changes[3:] == [("stored", digest) for digest in taker.block_digests] + gone
    manager.drop_contents()
    assert report.changes[-1] == ("evicted", first.block_digests[0])


def test_what_the_device_held_is_forgotten_and_its_blocks_are_free() -> None:
    manager = BlockManager(8, BLOCK_SIZE, draft_keys=(keys := DraftKeys(8, BLOCK_SIZE)))
    ended, _ = start(manager, tokens(3))
    keys.note_computed(ended.block_table, 0, 12)
    blocks = list(ended.block_table)
    manager.release(ended)
    assert len(manager.cached_blocks) == 3
    manager.drop_contents()
    assert sorted(manager.free_blocks) == list(range(8))
    assert not manager.cached_blocks
    assert num_hits(manager, [*tokens(3), 9]) == 0
    assert not any(keys.is_complete(block) for block in blocks)


def test_a_reset_of_some_accounts_leaves_what_others_have_computed() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    for account, first in ((7, 0), (8, 40)):
        sequence = make_sequence(tokens(2, first))
        sequence.account = Account(account)
        assert manager.allocate(sequence, 8)
        manager.publish(sequence, 8)
        manager.release(sequence)
    manager.reset([9])
    assert len(manager.cached_blocks) == 4
    manager.reset([7])
    assert [num_hits(manager, [*tokens(2, first), 9]) for first in (0, 40)] == [0, 2]
    manager.reset()
    assert len(manager.free_blocks) == 8


def test_blocks_beyond_the_tokens_that_count_are_given_back() -> None:
    manager = BlockManager(8, BLOCK_SIZE)
    sequence = make_sequence(tokens(5))
    assert manager.allocate(sequence, 17)
    table = list(sequence.block_table)
    manager.trim(sequence, 9)
    assert sequence.block_table == table[:3]
    assert sorted(manager.free_blocks) == sorted({*range(8)} - {*table[:3]})
    manager.trim(sequence, 12)
    assert sequence.block_table == table[:3]


def test_shared_blocks_have_the_draft_models_keys_as_far_as_it_has_computed_them() -> None:
    manager = BlockManager(16, BLOCK_SIZE, draft_keys=(keys := DraftKeys(16, BLOCK_SIZE)))
    first, _ = start(manager, tokens(3))
    keys.note_computed(first.block_table, 0, 8)
    follower, hits = start(manager, [*tokens(3), 9])
    assert (hits, follower.num_drafter_tokens) == (3, 8)
    same, other = make_sequence([*tokens(4, 60), 1]), make_sequence([*tokens(4, 60), 2])
    for sequence in (same, other):
        assert manager.allocate(sequence, 17)
        keys.note_computed(sequence.block_table, 0, 16)
        sequence.num_drafter_tokens = 16
    keys.forget_block(same.block_table[2])
    manager.publish(same, 16)
    manager.publish(other, 16)
    assert other.block_table[:4] == same.block_table[:4]
    assert (same.num_drafter_tokens, other.num_drafter_tokens) == (16, 8)
    manager.release(other)
    assert other.num_drafter_tokens == 0
    for sequence in (first, follower, same):
        manager.release(sequence)
    taker = make_sequence(tokens(16, 200))
    assert manager.allocate(taker, 64)
    assert not any(keys.is_complete(block) for block in range(16)), "they hold other tokens now"


def test_without_prefix_caching_nothing_is_hashed() -> None:
    manager = BlockManager(8, BLOCK_SIZE, prefix_caching=False)
    sequence, _ = start(manager, tokens(3))
    manager.extend_digests(sequence, 3)
    assert sequence.block_digests == []
