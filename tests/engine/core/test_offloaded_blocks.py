"""The block manager beside tiers: what comes back, how far it counts as computed, and what is kept for later."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tessera.engine.core.block_manager import STORED_AT_ONCE, STORED_SHARE, BlockManager
from tessera.engine.core.sequence import Sequence as EngineSequence
from tessera.engine.kv_tiers.load import Load, SavedTail
from tessera.engine.kv_tiers.published_block import NOWHERE, PublishedBlock
from tessera.engine.kv_tiers.slot_pool import SlotPool
from tests.engine.core.blocks import BLOCK_SIZE, Report, make_sequence, num_hits, start, tokens


class Host:
    """Host memory in place of `KVTiers`, without bounds until it `is_full`; a load brings at most `most` blocks."""

    def __init__(self, num_slots: int = 8192) -> None:
        self.is_up = True
        self.pool = SlotPool(num_slots)
        self.metrics = SimpleNamespace(num_queries=0, num_hits=0)
        self.kept: dict[bytes, PublishedBlock] = {}
        self.is_full = False
        self.log: list[tuple[str, Any]] = []
        self.most = 10**6
        self._num_slots = 100

    def find(
        self, digest: bytes, token_bytes: bytes, parent: PublishedBlock | None, salt: bytes
    ) -> PublishedBlock | None:
        found = self.kept.get(digest)
        return found if found is not None and found.holds(token_bytes, parent, salt) else None

    def store(self, published: PublishedBlock, block: int) -> None:
        if self.is_full:
            self.log.append(("refuse", block))
        elif published.slot == NOWHERE:
            published.slot = self._take()
            self.kept[published.digest] = published
            self.log.append(("store", block))

    def drop(self, published: PublishedBlock) -> None:
        published.slot = NOWHERE
        self.kept.pop(published.digest, None)

    def wipe(self, accounts: Collection[int] | None) -> Iterator[None]:
        self.log.append(("wipe", accounts))
        yield from ()

    def claim(self, block: int) -> None:
        self.log.append(("claim", block))

    def submit(self) -> None:
        self.log.append(("submit", None))

    def save_tail(self, blocks: Sequence[int], first: int, num_tokens: int) -> SavedTail:
        self.log.append(("save", list(blocks)))
        return SavedTail(first, num_tokens, [self._take() for _ in blocks])

    def drop_tail(self, tail: SavedTail) -> None:
        self.log.append(("drop", tail.first))

    def begin_load(self, wanted: Sequence[PublishedBlock], tail: SavedTail | None = None) -> Load:
        published: list[PublishedBlock | None] = list(wanted[: self.most])
        load = Load(published, [each.slot for each in wanted][: self.most])
        if tail is not None and len(load.slots) == len(wanted):
            load.published += [None] * len(tail.slots)
            load.slots += tail.slots
        load.num_loaded = len(load.slots)
        return load

    def submit_load(self, load: Load, blocks: list[int]) -> None:
        load.blocks = blocks

    def cancel(self, load: Load) -> None:
        self.log.append(("cancel", load))

    def noted(self, kind: str) -> list[Any]:
        return [value for name, value in self.log if name == kind]

    def _take(self) -> int:
        self._num_slots += 1
        return self._num_slots


def evict(manager: BlockManager, num_blocks: int) -> None:
    """Take so many blocks for another sequence, and give them back."""
    taker = make_sequence(tokens(60, first=1000))
    assert manager.allocate(taker, num_blocks * BLOCK_SIZE)
    manager.release(taker)


def make(num_blocks: int, **options: Any) -> tuple[BlockManager, Host]:
    host = Host()
    return BlockManager(num_blocks, BLOCK_SIZE, tiers=cast(Any, host), **options), host


def offload(manager: BlockManager, num_blocks: int, num_evicted: int) -> list[int]:
    """A prompt of so many blocks and a token, of which so many of the last blocks are on the device no more."""
    prompt = [*tokens(num_blocks), 9]
    manager.release(start(manager, prompt)[0])
    evict(manager, len(manager.free_blocks) + num_evicted)
    assert num_hits(manager, prompt) == num_blocks - num_evicted
    return prompt


def admit(manager: BlockManager, sequence: EngineSequence) -> bool:
    """Share what is on the device; -> whether more is on its way."""
    manager.share(sequence, manager.match_prefix(sequence))
    return manager.start_load(sequence)


@pytest.mark.parametrize("num_evicted", [1, 2, 3])
def test_what_was_evicted_comes_back_behind_what_is_there(num_evicted: int) -> None:
    manager, host = make(16)
    prompt = offload(manager, 3, num_evicted)
    sequence = make_sequence(prompt)
    assert admit(manager, sequence)
    first = 3 - num_evicted
    assert (len(sequence.block_table), sequence.num_computed_tokens) == (3, 12)
    assert host.metrics.num_queries == 12 - first * BLOCK_SIZE, "beyond the device"
    assert sequence.load is not None
    assert sequence.load.blocks == sequence.block_table[first:]
    assert num_hits(manager, prompt) == first, "others find it once it is there"
    assert manager.finish_load(sequence) == first
    assert host.metrics.num_hits == num_evicted * BLOCK_SIZE
    assert sequence.load is None
    assert sequence.num_published_blocks == 3
    assert manager.match_prefix(make_sequence(prompt)) == sequence.block_table
    assert [manager.reference_counts[block] for block in sequence.block_table] == [1, 1, 1]
    manager.release(sequence)
    assert manager.num_used_blocks == 0


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_load_that_fails_half_way_keeps_what_is_good(num_good: int) -> None:
    manager, host = make(16)
    prompt = offload(manager, 4, 3)
    sequence = make_sequence(prompt)
    assert admit(manager, sequence)
    assert sequence.load is not None
    sequence.load.num_loaded = num_good
    before = manager.num_used_blocks
    assert manager.finish_load(sequence) == 1
    assert (len(sequence.block_table), sequence.num_computed_tokens) == (1 + num_good, (1 + num_good) * BLOCK_SIZE)
    assert sequence.num_published_blocks == 1 + num_good
    assert host.metrics.num_hits == num_good * BLOCK_SIZE
    assert manager.num_used_blocks == before - (3 - num_good)
    assert manager.match_prefix(make_sequence(prompt)) == sequence.block_table


def test_the_last_token_is_left_to_compute_and_nothing_comes_behind_what_was_withdrawn() -> None:
    manager, _ = make(16)
    prompt = offload(manager, 3, 3)
    whole = make_sequence(prompt[:-1])
    assert admit(manager, whole)
    assert (len(whole.block_table), whole.num_computed_tokens) == (2, 8)
    manager, _ = make(16)
    sequence = make_sequence(offload(manager, 3, 2))
    manager.share(sequence, manager.match_prefix(sequence))
    manager.reset()
    assert manager.start_load(sequence) is False
    assert (len(sequence.block_table), sequence.load) == (1, None)


def test_fewer_blocks_may_come_than_were_wanted() -> None:
    manager, host = make(16)
    prompt = offload(manager, 3, 2)
    host.most = 0
    nothing = make_sequence(prompt)
    assert admit(manager, nothing) is False
    assert (nothing.load, len(nothing.block_table), nothing.num_computed_tokens) == (None, 1, 4)
    manager.release(nothing)
    host.most = 1
    sequence = make_sequence(prompt)
    assert admit(manager, sequence)
    assert (len(sequence.block_table), sequence.num_computed_tokens) == (2, 8)
    assert manager.finish_load(sequence) == 1
    assert sequence.num_published_blocks == 2


def test_what_is_withdrawn_while_it_loads_is_found_by_none() -> None:
    for place, num_found in ((1, 1), (2, 2)):
        manager, host = make(16)
        prompt = offload(manager, 3, 2)
        sequence = make_sequence(prompt)
        assert admit(manager, sequence)
        assert sequence.load is not None
        withdrawn = sequence.load.published[place - 1]
        assert withdrawn is not None
        host.drop(withdrawn)
        manager.finish_load(sequence)
        assert num_hits(manager, prompt) == num_found
        assert sequence.num_computed_tokens == 12, "it is right for this one"
        manager.release(sequence)


def test_what_a_failing_sequence_had_is_found_in_no_tier() -> None:
    manager, host = make(16)
    prompt = offload(manager, 3, 2)
    sequence = make_sequence(prompt)
    assert admit(manager, sequence)
    manager.finish_load(sequence)
    assert len(host.kept) == 2
    manager.release(sequence, withdraw=True)
    assert not host.kept
    assert admit(manager, make_sequence(prompt)) is False


def test_two_that_load_the_same_end_with_one_copy() -> None:
    manager, _ = make(16)
    prompt = offload(manager, 3, 2)
    first, second = make_sequence(prompt), make_sequence(prompt)
    assert admit(manager, first)
    assert admit(manager, second)
    for sequence in (first, second):
        manager.finish_load(sequence)
    assert first.block_table == second.block_table
    assert manager.num_used_blocks == 3


def test_what_was_published_anew_meanwhile_stays() -> None:
    manager, host = make(16)
    prompt = offload(manager, 3, 2)
    sequence = make_sequence(prompt)
    assert admit(manager, sequence)
    kept, host.kept = host.kept, {}
    again, _ = start(manager, prompt)
    host.kept = kept
    manager.finish_load(sequence)
    assert manager.match_prefix(make_sequence(prompt)) == again.block_table[:3]
    assert sequence.block_table[1:] != again.block_table[1:3]


def test_nothing_is_wanted_for_a_prompt_that_no_tier_has() -> None:
    manager, host = make(16)
    sequence = make_sequence(tokens(3))
    assert admit(manager, sequence) is False
    assert (sequence.block_table, sequence.num_computed_tokens, host.metrics.num_queries) == ([], 0, 11)
    start(manager, [*tokens(3), 9])
    assert admit(manager, make_sequence([*tokens(3), 9])) is False
    assert host.metrics.num_queries == 11, "all of it is on the device"
    alone = BlockManager(4, BLOCK_SIZE)
    assert alone.start_load(make_sequence(tokens(2))) is False
    uncached, _ = make(16, prefix_caching=False)
    assert admit(uncached, make_sequence(tokens(3))) is False


# ---- tails --------------------------------------------------------------------------------------


def preempted(manager: BlockManager, num_tokens: int = 10) -> EngineSequence:
    """A sequence of 12 tokens that had computed so many, and two published blocks of them."""
    sequence = make_sequence(tokens(3))
    assert manager.allocate(sequence, 12)
    manager.publish(sequence, 8)
    sequence.num_computed_tokens = num_tokens
    manager.save_tail(sequence)
    manager.release(sequence)
    return sequence


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_preempted_sequence_goes_on_in_the_middle_of_a_block(prefix_caching: bool) -> None:
    manager, host = make(8, prefix_caching=prefix_caching)
    sequence = preempted(manager)
    tail = sequence.saved_tail
    assert tail is not None
    first = 2 if prefix_caching else 0
    assert (tail.first, tail.num_tokens, len(tail.slots)) == (first, 10, 3 - first)
    assert admit(manager, sequence)
    assert (sequence.saved_tail, sequence.num_computed_tokens, len(sequence.block_table)) == (None, 10, 3)
    assert host.metrics.num_queries == 11 - first * BLOCK_SIZE
    assert manager.finish_load(sequence) == first
    assert sequence.num_published_blocks == first
    assert host.metrics.num_hits == 10 - first * BLOCK_SIZE
    assert not host.noted("drop")


def test_a_tail_comes_behind_what_else_is_loaded() -> None:
    manager, _ = make(8)
    sequence = preempted(manager)
    evict(manager, 7)
    assert admit(manager, sequence)
    assert (sequence.num_computed_tokens, len(sequence.block_table)) == (10, 3)
    assert manager.finish_load(sequence) == 1
    assert sequence.num_published_blocks == 2


def test_a_tail_is_not_used_where_less_than_all_before_it_comes() -> None:
    manager, host = make(8)
    sequence = preempted(manager)
    evict(manager, 8)
    host.most = 1
    assert admit(manager, sequence)
    assert (sequence.num_computed_tokens, len(sequence.block_table)) == (4, 1)


def test_a_tail_that_lost_what_is_before_it_is_not_used() -> None:
    manager, host = make(8)
    sequence = preempted(manager)
    evict(manager, 7)
    host.most = 0
    assert admit(manager, sequence) is False
    for spoil in ("reset", "down", "scored"):
        manager, host = make(8)
        sequence = preempted(manager)
        if spoil == "reset":
            manager.reset([0])
            assert host.noted("wipe") == [{0}]
        host.is_up = spoil != "down"
        if spoil == "scored":
            del sequence.token_ids[10:]  # the last token's logits are needed
        assert admit(manager, sequence) is False, spoil
        assert sequence.saved_tail is None
        assert host.noted("drop") == [2]


def test_a_tail_that_ends_with_the_last_token_but_one_is_used() -> None:
    manager, _ = make(8)
    sequence = preempted(manager, 11)
    assert admit(manager, sequence)
    assert sequence.num_computed_tokens == 11


def test_nothing_is_saved_of_what_is_published_or_still_loads() -> None:
    manager, host = make(8)
    assert preempted(manager, 8).saved_tail is None
    sequence = make_sequence(tokens(3))
    sequence.load = Load([], [])
    sequence.num_computed_tokens = 4
    assert manager.allocate(sequence, 12)
    manager.save_tail(sequence)
    assert (sequence.saved_tail, host.noted("save")) == (None, [])
    load = sequence.load
    manager.release(sequence)
    assert host.noted("cancel") == [load]
    assert sequence.load is None
    saved = preempted(manager)
    manager.drop_tail(saved)
    manager.drop_tail(saved)
    assert (host.noted("drop"), saved.saved_tail) == ([2], None)


# ---- ahead, and out -----------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ahead", "num_taken"), [(32, 2), (33, 3)])
def test_what_is_evicted_next_is_stored_ahead_once_a_sixteenth_was_taken(num_ahead: int, num_taken: int) -> None:
    manager, host = make(STORED_SHARE * num_ahead)
    ended, _ = start(manager, tokens(STORED_SHARE * num_ahead - 6))
    manager.release(ended)
    host.log.clear()
    manager._num_taken = 0
    taker = make_sequence(tokens(8, first=5000))
    assert manager.allocate(taker, (num_taken - 1) * BLOCK_SIZE)
    manager.store_ahead()
    assert not host.noted("store")
    assert manager.allocate(taker, num_taken * BLOCK_SIZE)
    manager.store_ahead()
    assert host.noted("store") == list(manager.cached_blocks)[: num_ahead - (6 - num_taken)], "the others are free"
    assert host.noted("submit") == [None]
    manager.store_ahead()
    assert manager.allocate(taker, (num_taken + 1) * BLOCK_SIZE)
    manager.store_ahead()
    assert host.noted("submit") == [None], "counted anew"
    assert sorted(host.noted("claim")) == sorted(taker.block_table)


def test_much_is_stored_ahead_in_parts() -> None:
    manager, host = make(3 * STORED_AT_ONCE * STORED_SHARE)
    manager.release(start(manager, tokens(manager.num_blocks))[0])
    host.log.clear()
    for count in (1, 2, 3, 3):
        manager.store_ahead()
        assert len(host.noted("store")) == count * STORED_AT_ONCE
    assert host.noted("store") == list(manager.cached_blocks)[: 3 * STORED_AT_ONCE], "what is evicted next comes first"
    assert len(host.noted("submit")) == 3, "then there is no more"


@pytest.mark.parametrize(("num_blocks", "num_slots", "expected"), [(16, 8192, 8), (16, 40, 5), (64, 8192, 20)])
def test_what_is_stored_ahead_leaves_room_on_the_device_and_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_slots: int, expected: int
) -> None:
    """It is in both, so at most half of the device and an eighth of host memory."""
    monkeypatch.setattr("tessera.engine.core.block_manager.MAX_STORED_AHEAD", 20)
    host = Host(num_slots)
    manager = BlockManager(num_blocks, BLOCK_SIZE, tiers=cast(Any, host))
    manager.release(start(manager, tokens(num_blocks))[0])
    host.log.clear()
    manager.store_ahead()
    assert host.noted("store") == list(manager.cached_blocks)[:expected]


def test_where_host_memory_is_full_nothing_more_is_stored_ahead() -> None:
    manager, host = make(16)
    manager.release(start(manager, tokens(16))[0])
    host.is_full = True
    manager.store_ahead()
    assert host.noted("refuse") == list(manager.cached_blocks)[:1], "the others would find no room either"
    assert host.noted("submit") == [None]
    host.is_full = False
    evict(manager, 1)
    manager.store_ahead()
    assert len(host.noted("store")) > 1, "later there may be room"


def test_nothing_is_stored_ahead_while_enough_is_free() -> None:
    manager, host = make(64)
    manager.release(start(manager, tokens(10))[0])
    manager.store_ahead()
    assert host.noted("submit")
    assert not host.noted("store")


def test_a_report_hears_nothing_of_a_block_that_a_tier_still_has() -> None:
    report = Report()
    manager, host = make(4, report=report)
    prompt = offload(manager, 3, 1)
    assert [kind for kind, _ in report.changes] == ["stored"] * 3
    assert len(host.noted("store")) == 1
    entries = [manager.published[block] for block in manager.match_prefix(make_sequence(prompt))]
    first, second = entries
    assert first is not None
    assert second is not None
    first.on_disk = True
    manager.drop_contents()
    assert report.changes[3:] == [("evicted", second.digest)]


def test_what_a_tier_has_is_published_as_the_same_block() -> None:
    manager, host = make(16)
    prompt = offload(manager, 3, 3)
    entry = next(iter(host.kept.values()))
    sequence = make_sequence(prompt)
    assert manager.allocate(sequence, 13)
    manager.publish(sequence, 13)
    assert {id(manager.published[block]) for block in sequence.block_table[:3]} == {
        id(one) for one in host.kept.values()
    }
    assert entry.block in sequence.block_table
