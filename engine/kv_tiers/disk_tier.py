"""The disk behind host memory: which blocks are there, and the threads that write and read them."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from tessera.engine.kv_tiers.block_files import BlockHeader, BlockStore, CorruptBlockError
from tessera.engine.kv_tiers.metrics import FROM_DISK, TO_DISK, TierMetrics
from tessera.engine.kv_tiers.published_block import PublishedBlock

logger = logging.getLogger("tessera.engine")

MAX_WRITES = 16  # under way at a time

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Executor(Protocol):
    """One thread that does its work in order, or a fake in tests."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]: ...
    def shutdown(self, *, cancel_futures: bool = False) -> None: ...


class DiskTier:
    """At most `max_blocks` blocks in `store`. Its methods are called by one thread, and wait for nothing.

    A block that was left by an earlier process is confirmed by its own tokens and salt, and by the digest of the block
    before it, which was confirmed itself.

    Attributes:
        entries: by digest, in the order of eviction: blocks, and headers of what an earlier process left.
        is_readable, is_writable: False after a fault.
    """

    def __init__(
        self,
        store: BlockStore,
        max_blocks: int,
        *,
        metrics: TierMetrics,
        reader: Executor | None = None,
        writer: Executor | None = None,
        digest: Callable[[bytes], bytes] = lambda data: hashlib.sha256(data).digest(),
    ) -> None:
        self.max_blocks = max_blocks
        self.entries: OrderedDict[bytes, PublishedBlock | BlockHeader] = OrderedDict()
        self.is_readable = self.is_writable = True
        self._store = store
        self._metrics = metrics
        self._digest = digest
        self._reader = reader if reader is not None else ThreadPoolExecutor(1, "kv-read")
        self._writer = writer if writer is not None else ThreadPoolExecutor(1, "kv-write")
        self._writes: list[tuple[PublishedBlock, Future[Any], int]] = []
        self._wiped: set[int] | None = set()  # accounts that were wiped before the scan was done; None: all
        self._unwanted: list[PublishedBlock] = []  # were dropped while they were written
        self._said_corrupt = False
        # Before any write, and beside reads, which would wait for it.
        self._scan: Future[list[BlockHeader]] | None = self._writer.submit(lambda: list(store.scan()))

    @property
    def can_write(self) -> bool:
        """Whether `write` takes another block now."""
        return self.is_writable and len(self._writes) < MAX_WRITES

    @property
    def is_scanning(self) -> bool:
        """Whether files of an earlier process are still being read in."""
        return self._scan is not None

    def close(self) -> None:
        """End the threads; removals that are under way are done before."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self._store.close()

    def find(
        self, digest: bytes, token_bytes: bytes, parent: PublishedBlock | None, salt: bytes
    ) -> PublishedBlock | None:
        entry = self.entries.get(digest) if self.is_readable else None
        if isinstance(entry, BlockHeader):
            found = PublishedBlock(digest, parent, token_bytes, salt, entry.account, on_disk=True)
            if not self._matches(entry, self._header(found)):
                return None
            self.entries[digest] = found
            return found
        return entry if entry is not None and entry.holds(token_bytes, parent, salt) else None

    def write(self, published: PublishedBlock, block: Bytes) -> bool:
        """Begin to write, which `can_write` allows; False if there is a file already.

        `block` must stay unchanged until `settle` returns the published one.
        """
        header = self._header(published)
        entry = self.entries.get(published.digest)
        if isinstance(entry, BlockHeader) and self._matches(entry, header):
            self.entries[published.digest] = published
            published.on_disk = True
            return False
        if entry is not None:  # unreachable, or another's with the same digest
            self._forget(published.digest)
        self._writes.append((published, self._writer.submit(self._store.write, header, block), block.nbytes))
        return True

    def read(self, published: PublishedBlock, block: Bytes) -> Future[Any]:
        """Begin to fill `block`."""
        return self._reader.submit(self._store.read, published.digest, block)

    def mark_used(self, published: PublishedBlock) -> None:
        """A block is evicted last, if it is here."""
        if published.on_disk:
            self.entries.move_to_end(published.digest)

    def check_read(self, published: PublishedBlock, read: Future[Any], nbytes: int) -> bool:
        """Whether a read that has ended is good; else its file is removed."""
        try:
            header: BlockHeader = read.result()
            is_good = self._matches(header, self._header(published))
        except (OSError, CorruptBlockError) as error:
            is_good = False
            if published.on_disk:  # else it was evicted meanwhile
                self._note_bad(error)
        if is_good:
            self._metrics.num_bytes[FROM_DISK] += nbytes
        else:
            self.remove(published)
        return is_good

    def note_stuck(self) -> None:
        """A read does not come to its end: nothing is found here any more."""
        if not self.is_readable:
            return
        self.is_readable = self.is_writable = False
        self._metrics.failures["disk_stuck"] += 1
        logger.warning("the disk with KV blocks does not answer: none are read or written any more")

    def settle(self) -> list[PublishedBlock]:
        """Take note of what the threads have done; -> blocks whose write has ended, well or not."""
        if self._scan is not None and self._scan.done():
            self._adopt(self._scan)
            self._scan = None
        ended = list(takewhile(lambda each: each[1].done(), self._writes))
        del self._writes[: len(ended)]
        for published, write, nbytes in ended:
            self._note_write(published, write, nbytes)
        return [published for published, _, _ in ended]

    def remove(self, published: PublishedBlock) -> None:
        """Remove a block's file, if it has one or is about to."""
        if published.on_disk:
            self._forget(published.digest)
        elif any(each is published for each, _, _ in self._writes):
            self._unwanted.append(published)
            self._writer.submit(self._store.remove, published.digest)

    def wipe_left(self, accounts: Collection[int] | None) -> Iterator[None]:
        """Remove what an earlier process left, of these accounts or of all: a block for each `next`."""
        if self._scan is not None:
            self._wiped = None if accounts is None or self._wiped is None else self._wiped | set(accounts)
            self._writer.submit(self._remove_scanned, self._scan, accounts)
        left = [
            digest
            for digest, entry in self.entries.items()
            if isinstance(entry, BlockHeader) and (accounts is None or entry.account in accounts)
        ]
        for digest in left:
            if digest in self.entries:
                self._forget(digest)
            yield

    def _note_write(self, published: PublishedBlock, write: Future[Any], nbytes: int) -> None:
        try:
            write.result()
        except OSError as error:
            self._unwanted = [each for each in self._unwanted if each is not published]
            self._metrics.failures["disk_write"] += 1
            if self.is_writable:
                self.is_writable = False
                logger.warning("no more KV blocks are written to disk: %s; those that are there stay in use", error)
            return
        self._metrics.num_bytes[TO_DISK] += nbytes
        if published.digest in self.entries:  # a scan has found an earlier process's, which this file replaces
            del self.entries[published.digest]
        if published in self._unwanted:  # and removed it behind the write
            self._unwanted.remove(published)
            return
        published.on_disk = True
        self.entries[published.digest] = published
        self._shrink()

    def _note_bad(self, error: Exception) -> None:
        self._metrics.failures["corrupt" if isinstance(error, CorruptBlockError) else "disk_read"] += 1
        if not self._said_corrupt:
            self._said_corrupt = True
            logger.warning(
                "a KV block on disk cannot be used and is computed again: %s; further ones are only counted, in "
                "kv_offload_failures",
                error,
            )

    def _adopt(self, scan: Future[list[BlockHeader]]) -> None:
        """Take over what an earlier process left; it is evicted first."""
        try:
            headers = scan.result()
        except OSError as error:
            self._metrics.failures["disk_read"] += 1
            logger.warning("the KV blocks that are on disk cannot be read: %s", error)
            return
        own, self.entries = self.entries, OrderedDict()
        for header in headers:
            if self._wiped is not None and header.account not in self._wiped and header.digest not in own:
                self.entries[header.digest] = header
        self.entries.update(own)
        self._shrink()

    def _remove_scanned(self, scan: Future[list[BlockHeader]], accounts: Collection[int] | None) -> None:
        """In the writer's thread, behind the scan: what is wiped goes even if nothing settles any more."""
        for header in scan.result():
            if accounts is None or header.account in accounts:
                self._store.remove(header.digest)

    def _shrink(self) -> None:
        while len(self.entries) > self.max_blocks:
            self._forget(next(iter(self.entries)))

    def _forget(self, digest: bytes) -> None:
        entry = self.entries.pop(digest)
        if isinstance(entry, PublishedBlock):
            entry.on_disk = False
        self._writer.submit(self._store.remove, digest)

    def _header(self, published: PublishedBlock) -> BlockHeader:
        salt_digest = self._digest(published.salt)
        return BlockHeader(
            digest=published.digest,
            parent=published.parent.digest if published.parent is not None else salt_digest,
            salt_digest=salt_digest,
            token_bytes=published.token_bytes,
            account=published.account,
        )

    @staticmethod
    def _matches(left: BlockHeader, wanted: BlockHeader) -> bool:
        """Whether a block that an earlier process left is this one."""
        return (left.token_bytes, left.parent, left.salt_digest) == (
            wanted.token_bytes,
            wanted.parent,
            wanted.salt_digest,
        )
