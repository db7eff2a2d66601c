"""KV blocks: allocation, reference counts and the prefix cache.

A block is in exactly one of three places:

    free    holds nothing of use
    cached  published and unreferenced; a prefix hit revives it, an allocation may evict it
    used    referenced by one or more sequences, published or not

A full block is published once its keys and values are computed. It is found again by a SHA-256 chain
over (parent's digest, token ids), with the salt at the root, and a hit is confirmed by comparing the
tokens and the parent block's own entry, so by induction the whole prefix: a hash collision costs a
hit, never a wrong answer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from tessera.engine.core.sequence import Sequence


class PublishedBlock(msgspec.Struct, eq=False, frozen=True):
    """Contents of a published block. Compared by identity: a block published again is another one.

    That makes everything behind a withdrawn block unreachable, because its parent is gone for good.
    """

    block: int
    digest: bytes
    parent: PublishedBlock | None
    token_bytes: bytes
    salt: bytes

    def holds(self, token_bytes: bytes, parent: PublishedBlock | None, salt: bytes) -> bool:
        return self.token_bytes == token_bytes and self.parent is parent and self.salt == salt


class BlockManager:
    """Hands out `num_blocks` blocks of `block_size` tokens to sequences.

    Attributes:
        free_blocks: a stack.
        cached_blocks: in the order of eviction. A sequence's blocks enter last block first, so that of
            a prefix the end is evicted before the beginning.
        reference_counts: [num_blocks]
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        digest: Callable[[bytes], bytes] = lambda data: hashlib.sha256(data).digest(),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.cached_blocks: OrderedDict[int, None] = OrderedDict()
        self.reference_counts = [0] * num_blocks
        self._published: list[PublishedBlock | None] = [None] * num_blocks
        self._by_digest: dict[bytes, PublishedBlock] = {}
        self._digest = digest

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
        return self._published[block] is not None

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold the beginning of `sequence`; takes no references.

        At most `max_shared_tokens` of its tokens are among them.
        """
        if not self.prefix_caching:
            return []
        digests = sequence.block_digests
        blocks: list[int] = []
        parent: PublishedBlock | None = None
        for token_bytes in sequence.block_bytes(0, sequence.max_shared_tokens // self.block_size, self.block_size):
            if len(digests) == len(blocks):  # lazily: most new prompts miss at the first block
                self._append_digest(sequence, token_bytes)
            entry = self._by_digest.get(digests[len(blocks)])
            if entry is None or not entry.holds(token_bytes, parent, sequence.prefix_salt):
                break
            blocks.append(entry.block)
            parent = entry
        return blocks

    def extend_digests(self, sequence: Sequence, num_blocks: int) -> None:
        """Compute the digests of the sequence's first `num_blocks` blocks, which its tokens fill."""
        num_known = len(sequence.block_digests)
        if self.prefix_caching and num_known < num_blocks:
            for token_bytes in sequence.block_bytes(num_known, num_blocks, self.block_size):
                self._append_digest(sequence, token_bytes)

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
        sequence.num_published_blocks = len(blocks)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the block table to hold `num_tokens` tokens; False, and nothing changed, if it cannot."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_new > self.num_available_blocks:
            return False
        for _ in range(num_new):
            block = self._take()
            self.reference_counts[block] = 1
            sequence.block_table.append(block)
        return True

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Let others share the full blocks of the first `num_computed_tokens` tokens.

        Where another sequence has published the same content first, the block table takes that block
        and gives the own one back, so equal prefixes that are computed at the same time end up shared.
        """
        if not self.prefix_caching:
            return
        first, num_full = sequence.num_published_blocks, num_computed_tokens // self.block_size
        parent = self._published[sequence.block_table[first - 1]] if first > 0 else None
        if first > 0 and parent is None:
            return  # the parent was withdrawn, so nothing behind it may be found
        self.extend_digests(sequence, num_full)
        for index, token_bytes in enumerate(sequence.block_bytes(first, num_full, self.block_size), first):
            parent = self._publish_block(sequence, index, token_bytes, parent)
        sequence.num_published_blocks = num_full

    def release(self, sequence: Sequence, *, withdraw: bool = False) -> None:
        """Drop the sequence's references; with `withdraw` its blocks are never shared again."""
        for block in reversed(sequence.block_table):
            if withdraw:
                self._withdraw(block)
            self._dereference(block)
        sequence.block_table.clear()
        sequence.num_published_blocks = 0

    def reset(self) -> None:
        """Take all blocks out of the prefix cache, even those in use."""
        for block, entry in enumerate(self._published):
            if entry is not None:
                self._withdraw(block)

    def _publish_block(
        self, sequence: Sequence, index: int, token_bytes: bytes, parent: PublishedBlock | None
    ) -> PublishedBlock:
        own = sequence.block_table[index]
        digest = sequence.block_digests[index]
        known = self._by_digest.get(digest)
        if known is not None:
            if known.holds(token_bytes, parent, sequence.prefix_salt):
                self._reference(known.block)
                sequence.block_table[index] = known.block
                self._dereference(own)
                return known
            self._withdraw(known.block)  # unreachable: its parent is gone
        entry = PublishedBlock(own, digest, parent, token_bytes, sequence.prefix_salt)
        self._by_digest[digest] = self._published[own] = entry
        return entry

    def _append_digest(self, sequence: Sequence, token_bytes: bytes) -> None:
        digests = sequence.block_digests
        parent = digests[-1] if digests else self._digest(sequence.prefix_salt)
        digests.append(self._digest(parent + token_bytes))

    def _take(self) -> int:
        """Pop a free block, or evict a cached one."""
        if self.free_blocks:
            return self.free_blocks.pop()
        block, _ = self.cached_blocks.popitem(last=False)
        self._forget(block)
        return block

    def _reference(self, block: int) -> None:
        if self.reference_counts[block] == 0:
            del self.cached_blocks[block]
        self.reference_counts[block] += 1

    def _dereference(self, block: int) -> None:
        self.reference_counts[block] -= 1
        if self.reference_counts[block] == 0:
            if self._published[block] is None:
                self.free_blocks.append(block)
            else:
                self.cached_blocks[block] = None

    def _withdraw(self, block: int) -> None:
        """Take a block out of the prefix cache, even while it is referenced."""
        self._forget(block)
        if block in self.cached_blocks:
            del self.cached_blocks[block]
            self.free_blocks.append(block)

    def _forget(self, block: int) -> None:
        entry = self._published[block]
        if entry is not None:
            self._published[block] = None
            del self._by_digest[entry.digest]
