"""Who waits for a prefix that another sequence is computing, instead of computing it as well.

Answers to one prompt (`n`), and requests that arrive together with the same long beginning, would otherwise all
compute it, because blocks can be shared only once they are full.
"""

from __future__ import annotations

from tessera.engine.core.block_manager import BlockManager
from tessera.engine.core.sequence import Sequence

MIN_AWAITED_BLOCKS = 4  # fewer are computed sooner than waited for


class PrefixesInProgress:
    """The blocks that running sequences will publish, by digest, each with the first who began it.

    A sequence waits only for one that is served before it, so the first in order never does. Digests alone
    decide: were two alike by chance, a sequence would wait in vain, and no more.
    """

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._owners: dict[bytes, Sequence] = {}
        self._begun: list[Sequence] = []  # running, and still without their digests among the owners

    def begin(self, sequence: Sequence) -> None:
        """It runs from here on, with its shared blocks in its table, and computes the rest."""
        sequence.awaited_digest = None
        self._begun.append(sequence)

    def note_begun(self) -> None:
        """Note what those compute who have begun: at the latest when somebody asks, at best while a step runs."""
        for sequence in self._begun:
            self._extend_digests(sequence)
            for digest in sequence.block_digests[sequence.num_published_blocks :]:
                self._owners.setdefault(digest, sequence)
        self._begun.clear()

    def publish(self, sequence: Sequence, first: int, num_full: int) -> bool:
        """Its blocks from `first` up to `num_full` can be shared; -> whether others may have waited for them."""
        self.note_begun()
        return self._drop(sequence, sequence.block_digests[first:num_full])

    def leave(self, sequence: Sequence) -> None:
        """It no longer runs; call it while `num_published_blocks` still counts."""
        self.note_begun()
        self._drop(sequence, sequence.block_digests[sequence.num_published_blocks :])

    def waits(self, sequence: Sequence) -> bool:
        """Whether what `sequence` was found to wait for is still on its way."""
        return sequence.awaited_digest in self._owners

    def await_longest(self, sequence: Sequence, num_shared: int) -> bool:
        """Let a sequence that could share `num_shared` blocks now wait for more, if enough are on their way."""
        self.note_begun()
        if not self._owners:
            return False
        self._extend_digests(sequence)
        digests = sequence.block_digests[: sequence.max_shared_tokens // self._block_manager.block_size]
        for index in range(len(digests) - 1, num_shared + MIN_AWAITED_BLOCKS - 2, -1):
            owner = self._owners.get(digests[index])
            if owner is not None:
                if owner.order < sequence.order:
                    sequence.awaited_digest = digests[index]
                    return True
                return False
        return False

    def _extend_digests(self, sequence: Sequence) -> None:
        blocks = self._block_manager
        blocks.extend_digests(sequence, (sequence.num_tokens - 1) // blocks.block_size)

    def _drop(self, sequence: Sequence, digests: list[bytes]) -> bool:
        dropped = False
        for digest in digests:
            if self._owners.get(digest) is sequence:
                del self._owners[digest]
                dropped = True
        return dropped
