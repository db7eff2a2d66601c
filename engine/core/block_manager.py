"""KV blocks: allocation, reference counts and the prefix cache.

A block is in exactly one of three places:

    free    holds nothing of use
    cached  published and unreferenced; a prefix hit revives it, an allocation may evict it
    used    referenced by one or more sequences, published or not

A full block is published once its keys and values are computed. It is found again by a SHA-256 chain
over (parent's digest, token ids), with the salt at the root, and a hit is confirmed by comparing the
tokens and the parent block's own entry, so by induction the whole prefix: a hash collision costs a
hit, never a wrong answer.

With `tiers`, evicted blocks go there, and a sequence whose prefix lies there has it loaded before its first step.
A `report` hears of every block that can be found from now on, and of those that cannot any more; what lies in a tier
can. `draft_keys` know which blocks a draft model has computed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice, takewhile

from tessera.engine.contract.block_digests import Digest, sha256
from tessera.engine.core.sequence import Sequence
from tessera.engine.kv_tiers.load import SavedTail
from tessera.engine.kv_tiers.prefix_report import PrefixReport
from tessera.engine.kv_tiers.published_block import NOWHERE, PublishedBlock
from tessera.engine.kv_tiers.tiers import KVTiers
from tessera.engine.speculation.draft_keys import DraftKeys

MAX_STORED_AHEAD = 1024  # blocks of the device that can be had without waiting for a copy of their contents
STORED_SHARE = 2  # of the device's blocks at most one in so many
DOUBLE_SHARE = 8  # of the slots of host memory at most one in so many, as what is stored ahead is in both
MAX_RELEASED = 2**15  # references that are dropped in one step, in a few milliseconds
MAX_RESET = 4096  # blocks that are looked at in one step, of a cache that is reset: likewise
STORED_AT_ONCE = 128  # blocks, for half a millisecond of calls of the driver


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens to sequences.

    Attributes:
        free_blocks: a stack.
        cached_blocks: in the order of eviction. A sequence's blocks enter last block first, so that of
            a prefix the end is evicted before the beginning.
        reference_counts: [num_blocks]
        published: [num_blocks], what can be found in each block.
        leaving: tables of sequences that have gone, whose references are dropped in the next steps: a thousand
            sequences may share a long prompt and end together.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        tiers: KVTiers | None = None,
        digest: Digest = sha256,
        report: PrefixReport | None = None,
        draft_keys: DraftKeys | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.tiers = tiers
        self.draft_keys = draft_keys
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.cached_blocks: OrderedDict[int, None] = OrderedDict()
        self.reference_counts = [0] * num_blocks
        self.published: list[PublishedBlock | None] = [None] * num_blocks
        self.leaving: deque[list[int]] = deque()
        self._release_room = MAX_RELEASED
        self._resets: deque[frozenset[int] | None] = deque()  # whose blocks; that of the first is under way
        self._reset_steps: Iterator[None] | None = None
        self._by_digest: dict[bytes, PublishedBlock] = {}
        self._digest = digest
        self._report = report
        num_slots = tiers.pool.num_slots if tiers is not None else 0
        self._num_ahead = min(MAX_STORED_AHEAD, num_blocks // STORED_SHARE, num_slots // DOUBLE_SHARE)
        self._is_behind = False  # more is to be stored ahead
        self._num_taken = 0  # since blocks were stored ahead

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation can have."""
        return len(self.free_blocks) + len(self.cached_blocks)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_available_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_published(self, block: int) -> bool:
        return self.published[block] is not None

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold the beginning of `sequence`; takes no references.

        At most `max_shared_tokens` of its tokens are among them.
        """
        self.match_some(sequence, self.num_blocks)
        return sequence.matched_blocks

    def match_some(self, sequence: Sequence, most: int) -> bool:
        """Find at most so many more of what `match_prefix` gives; -> whether that is all."""
        if not self.prefix_caching:
            return True
        matched, size, salt = sequence.matched, self.block_size, sequence.prefix_salt
        end = sequence.max_shared_tokens // size
        blocks = sequence.matched_blocks
        if NOWHERE in blocks or len(blocks) > end:  # nothing else can have changed since the last time
            del matched[min(blocks.index(NOWHERE) if NOWHERE in blocks else end, end) :]
        if self._resets:
            matched[:] = takewhile(self._is_kept, matched)
        parent = matched[-1] if matched else None
        stop, ahead = len(matched), 1
        last = min(end, stop + most)
        while len(matched) == stop < last:  # ever more at a time: most new prompts miss at the first block
            first, stop = stop, min(stop + ahead, last)
            ahead *= 2
            sequence.extend_digests(stop, size, self._digest)
            entries = map(self._by_digest.get, sequence.block_digests[first:stop])
            for found, token_bytes in zip(entries, sequence.block_bytes(first, stop, size), strict=True):
                if found is None or not found.holds(token_bytes, parent, salt) or not self._is_kept(found):
                    break
                matched.append(found)
                parent = found
        return not len(matched) == last < end

    def extend_digests(self, sequence: Sequence, num_blocks: int) -> None:
        """Compute the digests of the sequence's first `num_blocks` blocks, which its tokens fill."""
        if self.prefix_caching:
            sequence.extend_digests(num_blocks, self.block_size, self._digest)

    def fits(self, num_tokens: int, shared_blocks: list[int], *, spare: int) -> bool:
        """Whether `num_tokens` tokens, the first in `shared_blocks`, leave `spare` blocks available."""
        counts = self.reference_counts
        num_revived = sum(counts[block] == 0 for block in shared_blocks)
        num_new = self.num_blocks_for(num_tokens) - len(shared_blocks)
        return num_new + num_revived + spare <= self.num_available_blocks

    def share(self, sequence: Sequence, blocks: list[int]) -> None:
        """Make `blocks`, from `match_prefix`, the first of a sequence that holds none."""
        assert not sequence.block_table
        for block in blocks:
            self._reference(block)
        sequence.block_table.extend(blocks)
        sequence.matched.clear()
        sequence.num_published_blocks = len(blocks)
        if self.draft_keys is not None:
            sequence.num_drafter_tokens = self.draft_keys.count_tokens(blocks)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the block table to hold `num_tokens` tokens; False, and nothing changed, if it cannot."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        while num_new > self.num_available_blocks:
            if not self.leaving:
                return False
            self._drop_references(MAX_RELEASED)
        for _ in range(num_new):
            block = self._take()
            self.reference_counts[block] = 1
            sequence.block_table.append(block)
            if self.tiers is not None:
                self.tiers.claim(block)
        return True

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks beyond those of the first `num_tokens` tokens, which have not been published."""
        table = sequence.block_table
        while len(table) > self.num_blocks_for(num_tokens):
            self._dereference((table.pop(),))

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Let others share the full blocks of the first `num_computed_tokens` tokens.

        Where another sequence has published the same content first, the block table takes that block
        and gives the own one back, so equal prefixes that are computed at the same time end up shared.
        """
        if not self.prefix_caching:
            return
        first, num_full = sequence.num_published_blocks, num_computed_tokens // self.block_size
        parent = self.published[sequence.block_table[first - 1]] if first > 0 else None
        if first > 0 and (parent is None or not self._is_kept(parent)):
            return  # the parent was withdrawn, so nothing behind it may be found
        self.extend_digests(sequence, num_full)
        for index, token_bytes in enumerate(sequence.block_bytes(first, num_full, self.block_size), first):
            parent = self._publish_block(sequence, index, token_bytes, parent)
        sequence.num_published_blocks = num_full

    def release(self, sequence: Sequence, *, withdraw: bool = False) -> None:
        """Drop the sequence's references; with `withdraw` its blocks are never shared again."""
        if sequence.load is not None and self.tiers is not None:
            self.tiers.cancel(sequence.load)
            sequence.load = None
        if withdraw:
            for block in reversed(sequence.block_table):
                self._withdraw(block)
                self._dereference((block,))
        else:
            self.leaving.append(sequence.block_table)
            self._release_room -= self._drop_references(self._release_room)
        sequence.block_table = []
        sequence.num_published_blocks = sequence.num_drafter_tokens = sequence.num_drafter_chunk = 0

    def release_more(self) -> bool:
        """Go on with what sequences have released, and with resets, once before each step; -> whether blocks came."""
        self._go_on_with_resets()
        num_dropped = self._drop_references(MAX_RELEASED)
        self._release_room = MAX_RELEASED - num_dropped
        return num_dropped > 0

    @property
    def is_resetting(self) -> bool:
        """Whether `release_more` has to go on with a reset."""
        return bool(self._resets)

    def reset(self, accounts: Collection[int] | None = None) -> None:
        """Take all blocks out of the prefix cache, even those in use, or those that these accounts have computed.

        That takes several steps where there are many. None of them is found meanwhile.
        """
        added = None if accounts is None else frozenset(accounts)
        if len(self._resets) > 1:  # that has not begun
            last = self._resets.pop()
            added = None if last is None or added is None else last | added
        self._resets.append(added)
        self._go_on_with_resets()

    def _is_kept(self, entry: PublishedBlock) -> bool:
        """Whether no reset will withdraw it."""
        return not any(accounts is None or entry.account in accounts for accounts in self._resets)

    def _go_on_with_resets(self) -> None:
        for _ in range(MAX_RESET):
            if self._reset_steps is None:
                if not self._resets:
                    return
                self._reset_steps = self._withdraw_all(self._resets[0])
            if next(self._reset_steps, True):
                self._reset_steps = None
                self._resets.popleft()

    def _withdraw_all(self, accounts: Collection[int] | None) -> Iterator[None]:
        """Tiers first: what is brought back from them meanwhile lies on the device."""
        if self.tiers is not None:
            yield from self.tiers.wipe(accounts)
        for block, entry in enumerate(self.published):
            if entry is not None and (accounts is None or entry.account in accounts):
                self._withdraw(block)
            yield

    def drop_contents(self) -> None:
        """Forget what the device's blocks hold, but not what the tiers do; no sequence has any."""
        assert not any(self.reference_counts), "no sequence has blocks"  # and none is leaving
        for block in list(self.cached_blocks):
            entry = self._forget(block)
            if entry is not None and self._report is not None and entry.slot == NOWHERE and not entry.on_disk:
                self._report.note_evicted(entry.digest)
        self.free_blocks += self.cached_blocks
        self.cached_blocks.clear()
        if self.draft_keys is not None:
            self.draft_keys.forget_all()

    # -- tiers ----------------------------------------------------------------------------------

    def start_load(self, sequence: Sequence) -> bool:
        """Begin to bring back what follows the sequence's shared blocks, which are all that it has; False if nothing.

        Its table gets the blocks, which hold their contents once its load is done and `finish_load` was called. Its
        tokens in them count as computed.
        """
        if self.tiers is None:
            return False
        first = len(sequence.block_table)
        sequence.num_computed_tokens = first * self.block_size
        wanted = self._find_offloaded(sequence)
        tail = self._take_tail(sequence, first + len(wanted))
        self.tiers.metrics.num_queries += max(sequence.max_shared_tokens - first * self.block_size, 0)
        if not wanted and tail is None:
            return False
        load = self.tiers.begin_load(wanted, tail)
        if not load.slots:
            return False
        blocks = [self._take() for _ in load.slots]
        for block in blocks:
            self.reference_counts[block] = 1
        sequence.block_table += blocks
        has_tail = tail is not None and load.published[-1] is None
        sequence.num_computed_tokens = tail.num_tokens if tail and has_tail else (first + len(blocks)) * self.block_size
        sequence.load = load
        self.tiers.submit_load(load, blocks)
        return True

    def finish_load(self, sequence: Sequence) -> int:
        """Keep what a load that is done has brought, and let others share it; -> index of its first block."""
        load, sequence.load = sequence.load, None
        assert load is not None
        assert self.tiers is not None
        table = sequence.block_table
        first = len(table) - len(load.slots)
        if load.num_loaded < len(load.slots):
            for block in reversed(table[first + load.num_loaded :]):
                self._dereference((block,))
            del table[first + load.num_loaded :]
            sequence.num_computed_tokens = len(table) * self.block_size
        loaded = [published for published in load.published[: load.num_loaded] if published is not None]
        for index, (published, slot) in enumerate(zip(loaded, load.slots, strict=False), first):
            known = self._by_digest.get(published.digest)
            if published.slot != slot or known not in (None, published):
                break  # withdrawn meanwhile: this sequence alone has it, and nothing behind it may be found
            self._place(sequence, index, published)
        sequence.num_published_blocks = first + len(loaded)
        self.tiers.metrics.num_hits += sequence.num_computed_tokens - first * self.block_size
        return first

    def save_tail(self, sequence: Sequence) -> None:
        """Keep what a sequence that is preempted has computed and not published; the rest is kept anyway."""
        if self.tiers is None or sequence.load is not None:
            return
        first, num_tokens = sequence.num_published_blocks, sequence.num_computed_tokens
        blocks = sequence.block_table[first : self.num_blocks_for(num_tokens)]
        if blocks:
            sequence.saved_tail = self.tiers.save_tail(blocks, first, num_tokens)

    def drop_tail(self, sequence: Sequence) -> None:
        """Forget what `save_tail` kept."""
        tail, sequence.saved_tail = sequence.saved_tail, None
        if self.tiers is not None and tail is not None:
            self.tiers.drop_tail(tail)

    def store_ahead(self) -> None:
        """Copy what is evicted next, so that what evicts it need not wait; ideally while a step runs."""
        if self.tiers is None or not (self._is_behind or self._num_taken * 16 >= self._num_ahead):
            return
        self._num_taken, self._is_behind = 0, False
        num_stored = 0
        for block in islice(self.cached_blocks, max(self._num_ahead - len(self.free_blocks), 0)):
            published = self.published[block]
            assert published is not None, "what is cached is published"
            if published.slot != NOWHERE:
                continue
            if num_stored == STORED_AT_ONCE:
                self._is_behind = True
                break
            self.tiers.store(published, block)
            if published.slot == NOWHERE:
                break  # host memory is in use
            num_stored += 1
        self.tiers.submit()

    def _find_offloaded(self, sequence: Sequence) -> list[PublishedBlock]:
        """The blocks behind those that the sequence has, as far as the tiers have them."""
        found: list[PublishedBlock] = []
        if self.tiers is None or not self.prefix_caching:
            return found
        first, end = len(sequence.block_table), sequence.max_shared_tokens // self.block_size
        parent = self.published[sequence.block_table[-1]] if first else None
        if first and parent is None:
            return found
        for index, token_bytes in enumerate(sequence.block_bytes(first, end, self.block_size), first):
            self.extend_digests(sequence, end if found else index + 1)  # most new prompts miss at the first block
            published = self.tiers.find(sequence.block_digests[index], token_bytes, parent, sequence.prefix_salt)
            if published is None or published.block != NOWHERE or not self._is_kept(published):
                break
            found.append(published)
            parent = published
        return found

    def _take_tail(self, sequence: Sequence, first: int) -> SavedTail | None:
        """The sequence's saved tail, if it begins at block `first` and can be used."""
        assert self.tiers is not None
        tail = sequence.saved_tail
        if tail is None:
            return None
        if not self.tiers.is_up or tail.first != first or tail.num_tokens > sequence.max_shared_tokens:
            self.drop_tail(sequence)
            return None
        sequence.saved_tail = None
        return tail

    def _publish_block(
        self, sequence: Sequence, index: int, token_bytes: bytes, parent: PublishedBlock | None
    ) -> PublishedBlock:
        digest = sequence.block_digests[index]
        known = self._by_digest.get(digest)
        if known is not None:
            if known.holds(token_bytes, parent, sequence.prefix_salt) and self._is_kept(known):
                self._place(sequence, index, known)
                return known
            self._withdraw(known.block)  # unreachable: its parent is gone, or it will be
        salt = sequence.prefix_salt
        entry = self.tiers.find(digest, token_bytes, parent, salt) if self.tiers is not None else None
        if entry is None:
            entry = PublishedBlock(digest, parent, token_bytes, salt, sequence.account.id)
        self._place(sequence, index, entry)
        return entry

    def _place(self, sequence: Sequence, index: int, entry: PublishedBlock) -> None:
        """A sequence's block holds `entry`: publish it, or share the one that holds it already."""
        own = sequence.block_table[index]
        if entry.block == NOWHERE:
            entry.block = own
            self._by_digest[entry.digest] = self.published[own] = entry
            if self._report is not None:
                self._report.note_stored(entry.digest)
        else:
            self._reference(entry.block)
            sequence.block_table[index] = entry.block
            if self.draft_keys is not None and not self.draft_keys.is_complete(entry.block):
                sequence.num_drafter_tokens = min(sequence.num_drafter_tokens, index * self.block_size)
            self._dereference((own,))

    def _take(self) -> int:
        """Pop a free block, or evict a cached one."""
        self._num_taken += 1
        if self.free_blocks:
            block = self.free_blocks.pop()
            if self.draft_keys is not None:
                self.draft_keys.forget_block(block)
            return block
        block, _ = self.cached_blocks.popitem(last=False)
        if self.draft_keys is not None:
            self.draft_keys.forget_block(block)
        entry = self._forget(block)
        if entry is not None:
            if self.tiers is not None and self._is_kept(entry):
                self.tiers.store(entry, block)
            else:
                self._lose(entry)
        return block

    def _reference(self, block: int) -> None:
        if self.reference_counts[block] == 0:
            del self.cached_blocks[block]
        self.reference_counts[block] += 1

    def _dereference(self, blocks: Iterable[int]) -> None:
        counts, published = self.reference_counts, self.published
        for block in blocks:
            count = counts[block] = counts[block] - 1
            if count == 0:
                if published[block] is None:
                    self.free_blocks.append(block)
                else:
                    self.cached_blocks[block] = None

    def _drop_references(self, most: int) -> int:
        """Drop at most so many references of sequences that have gone; -> how many."""
        num_dropped = 0
        while self.leaving and num_dropped < most:
            table = self.leaving[0]
            first = max(len(table) - (most - num_dropped), 0)
            self._dereference(reversed(table[first:]))
            num_dropped += len(table) - first
            del table[first:]
            if not table:
                self.leaving.popleft()
        return num_dropped

    def _withdraw(self, block: int) -> None:
        """Take a block out of the prefix cache, even while it is referenced."""
        entry = self._forget(block)
        if entry is not None:
            self._lose(entry)
        if block in self.cached_blocks:
            del self.cached_blocks[block]
            self.free_blocks.append(block)

    def _lose(self, entry: PublishedBlock) -> None:
        """Drop an entry that the device no longer holds from the tiers, and report it as evicted."""
        if self.tiers is not None:
            self.tiers.drop(entry)
        if self._report is not None:
            self._report.note_evicted(entry.digest)

    def _forget(self, block: int) -> PublishedBlock | None:
        """A block of the device holds nothing that can be found; -> what it held."""
        entry = self.published[block]
        if entry is not None:
            self.published[block] = None
            entry.block = NOWHERE
            del self._by_digest[entry.digest]
        return entry
