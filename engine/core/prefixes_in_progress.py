"""Prefixes that a running sequence is computing, for which others wait instead of computing them as well.

Several completions of one prompt (`n`), and requests that arrive together with the same long prefix, would otherwise
all compute it, because blocks can be shared only once they are full.
"""

from __future__ import annotations

from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.sequence import Sequence

MIN_AWAITED_BLOCKS = 4  # fewer are not worth waiting for
MAX_INDEXED_BLOCKS = 2048  # of running sequences in one step: hashing them takes a few milliseconds


class PrefixesInProgress:
    """The blocks that running sequences will publish, by digest, each with the first sequence to compute it.

    A sequence waits only for one that is served before it, so the first in order never waits. Only digests are
    compared: a collision makes a sequence wait longer, no more.
    """

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._owners: dict[bytes, Sequence] = {}
        self._unindexed: dict[Sequence, int] = {}  # running, and from which block on it is not among the owners
        self._room = MAX_INDEXED_BLOCKS

    def begin_step(self) -> None:
        self._room = MAX_INDEXED_BLOCKS

    def add_running(self, sequence: Sequence) -> None:
        """`sequence` starts to run, with its shared blocks in its table, and computes the rest."""
        sequence.awaited_digest = None
        self._unindexed[sequence] = 0

    def index_running(self) -> None:
        """Index blocks that running sequences will publish; lazy, so ideally called while a step runs.

        Of a long prompt first those that are published first: the others follow in the next steps.
        """
        while self._unindexed and self._room > 0:
            sequence, first = next(iter(self._unindexed.items()))
            first = max(first, sequence.num_published_blocks)
            end = self._num_full(sequence)
            stop = min(end, first + self._room)
            self._block_manager.extend_digests(sequence, stop)
            for digest in sequence.block_digests[first:stop]:
                self._owners.setdefault(digest, sequence)
            self._room -= max(stop - first, 0)
            if stop < end:
                self._unindexed[sequence] = stop
            else:
                del self._unindexed[sequence]

    def publish(self, sequence: Sequence, first: int, num_full: int) -> bool:
        """The blocks from `first` up to `num_full` can be shared; -> whether others may have waited for them."""
        return self._drop(sequence, sequence.block_digests[first:num_full])

    def remove_running(self, sequence: Sequence) -> None:
        """`sequence` stops running; call it before `num_published_blocks` is reset."""
        self._unindexed.pop(sequence, None)
        self._drop(sequence, sequence.block_digests[sequence.num_published_blocks :])

    def is_waiting(self, sequence: Sequence) -> bool:
        """Whether the block that `sequence` waits for is still being computed."""
        return sequence.awaited_digest in self._owners

    def await_longest(self, sequence: Sequence, num_shared: int, most: int) -> bool:
        """Make a sequence that could share `num_shared` blocks now wait for more, if enough are being computed.

        It also waits for the next step if more than `most` of its blocks are to be hashed before that is known.
        """
        self.index_running()
        if not self._owners:
            return False
        end = sequence.max_shared_tokens // self._block_manager.block_size
        self._block_manager.extend_digests(sequence, min(end, len(sequence.block_digests) + most))
        digests = sequence.block_digests[:end]
        for index in range(len(digests) - 1, num_shared + MIN_AWAITED_BLOCKS - 2, -1):
            owner = self._owners.get(digests[index])
            if owner is not None:
                if owner.order < sequence.order:
                    sequence.awaited_digest = digests[index]
                    return True
                return False
        return len(digests) < end

    def _num_full(self, sequence: Sequence) -> int:
        """Blocks that its tokens fill, but for the last one."""
        return (sequence.num_tokens - 1) // self._block_manager.block_size

    def _drop(self, sequence: Sequence, digests: list[bytes]) -> bool:
        dropped = False
        for digest in digests:
            if self._owners.get(digest) is sequence:
                del self._owners[digest]
                dropped = True
        return dropped
