"""KV blocks in host memory and on disk: what is kept there, what is on its way, and what to do after a fault.

The block manager offers each block that it evicts (`store`), asks for what the device does not have (`find`), and has
it brought back (`begin_load`, `submit_load`). All of it is submitted and none of it waited for: `poll` takes note of
what is done. One thread calls all methods.

A call of the driver for each block takes the host 4 us, so what the device has a step for is submitted in parts:
`submit_load`, `poll` and `go_on` submit some of a load each.

Order: copies see what all steps before them have written. A step that is to write to a block which a copy still reads
is held until that copy is done (`claim`), and a load into it begins after it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from tessera.engine.contract.errors import DeviceError
from tessera.engine.kv_tiers.copies import BlockCopies
from tessera.engine.kv_tiers.disk_tier import DiskTier
from tessera.engine.kv_tiers.load import Load, SavedTail
from tessera.engine.kv_tiers.metrics import TO_DEVICE, TO_HOST, TierMetrics
from tessera.engine.kv_tiers.published_block import NOWHERE, PublishedBlock
from tessera.engine.kv_tiers.slot_pool import SlotPool
from tessera.engine.tensor import Mark

logger = logging.getLogger("tessera.engine")

WRITTEN_AHEAD = 64  # slots that can be had at once: free ones, and those whose blocks are on disk already
MAX_READ_SECONDS = 10.0  # from a load's beginning; then what has not been read is computed
WAIT_SECONDS = 0.0005  # between two looks at copies, where nothing else is to be done


class Parts(NamedTuple):
    """Blocks whose copies are submitted at a time.

    Attributes:
        stored: with one mark; a step that writes to one of them waits for all.
        before_step: of loads, before a step is submitted, which other sequences wait for.
        beside_decodes: the same once a step of decodes is; 5 ms of it are 130 blocks of 2 MiB at 55 GB/s.
        beside_prompts: the same once a step with prompts is, which takes longer.
    """

    stored: int = 32
    before_step: int = 64
    beside_decodes: int = 128
    beside_prompts: int = 512


class KVTiers:
    """Host memory of `copies.num_slots` blocks, and behind it `disk`, if there is one.

    Attributes:
        pool: the slots.
        is_up: False after a fault of the copies: nothing is found, nothing is kept.
        loads: under way, cancelled ones too.
    """

    def __init__(
        self,
        copies: BlockCopies,
        *,
        disk: DiskTier | None = None,
        metrics: TierMetrics | None = None,
        parts: Parts | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pool = SlotPool(copies.num_slots)
        self.disk = disk
        self.metrics = metrics if metrics is not None else TierMetrics()
        self.metrics.gauges = self._gauges
        self.is_up = True
        self.loads: list[Load] = []
        self._copies = copies
        self._parts = parts if parts is not None else Parts()
        self._clock = clock
        self._sleep = sleep
        self._by_digest: dict[bytes, PublishedBlock] = {}  # in host memory
        self._pending: list[tuple[int, int]] = []  # blocks to copy to slots with the next `submit`
        self._pending_blocks: set[int] = set()
        self._claimed: set[int] = set()  # pending blocks that the next step writes to
        self._storing: deque[tuple[Mark, list[int], list[int]]] = deque()  # in the order in which they end
        self._storing_slots: dict[int, Mark] = {}
        self._busy: dict[int, Mark] = {}  # blocks that a copy may still use
        self._reads: dict[int, tuple[PublishedBlock, Future[Any]]] = {}  # by slot
        self._write_slots: dict[int, PublishedBlock] = {}

    @property
    def copied_blocks(self) -> frozenset[int]:
        """Blocks of the device that a copy may still use."""
        return frozenset(self._busy.keys() | self._pending_blocks)

    # -- contents -------------------------------------------------------------------------------

    def find(
        self, digest: bytes, token_bytes: bytes, parent: PublishedBlock | None, salt: bytes
    ) -> PublishedBlock | None:
        """A block in host memory or on disk, confirmed as on the device."""
        if not self.is_up:
            return None
        found = self._by_digest.get(digest)
        if found is not None and found.holds(token_bytes, parent, salt):
            return found
        return self.disk.find(digest, token_bytes, parent, salt) if self.disk is not None else None

    def drop(self, published: PublishedBlock) -> None:
        """A block is found in no tier any more."""
        if published.slot != NOWHERE:
            self._leave_host(published)
            self.pool.drop(published)
        if self.disk is not None:
            self.disk.remove(published)

    def wipe(self, accounts: Collection[int] | None = None) -> Iterator[None]:
        """Drop the blocks that these accounts have computed, or all: one for each `next`."""
        found = [*self.pool.kept.values(), *self._write_slots.values()]
        if self.disk is not None:
            found += [entry for entry in self.disk.entries.values() if isinstance(entry, PublishedBlock)]
            yield from self.disk.wipe_left(accounts)
        for published in found:
            if accounts is None or published.account in accounts:
                self.drop(published)
                yield

    # -- to host memory -------------------------------------------------------------------------

    def store(self, published: PublishedBlock, block: int) -> None:
        """Keep what `block` of the device holds; it is copied with the next `submit`."""
        if not self.is_up or published.slot != NOWHERE:
            return
        slot = self._take_slot()
        if slot is None:
            return
        self._keep(slot, published)
        self._copy_out(block, slot)

    def save_tail(self, blocks: Sequence[int], first: int, num_tokens: int) -> SavedTail | None:
        """Keep blocks for the sequence that has computed them; None if there is no room."""
        if not self.is_up or len(self.pool.private) + len(blocks) > self.pool.num_slots // 2:
            return None
        tail = SavedTail(first, num_tokens, [])
        while len(tail.slots) < len(blocks):
            slot = self._take_slot()
            if slot is None:
                self.drop_tail(tail)
                return None
            self.pool.keep_privately(slot)
            tail.slots.append(slot)
        for block, slot in zip(blocks, tail.slots, strict=True):
            self._copy_out(block, slot)
        return tail

    def drop_tail(self, tail: SavedTail) -> None:
        for slot in tail.slots:
            self.pool.unpin(slot)
        tail.slots.clear()

    def claim(self, block: int) -> None:
        """A step is to write to a block of the device, which a copy may still use."""
        if block in self._pending_blocks:
            self._claimed.add(block)
        elif (mark := self._busy.get(block)) is not None:
            self._hold_steps(mark)

    def submit(self) -> None:
        """Submit the copies to host memory. To be called before a step that may write to their blocks."""
        pending, self._pending = self._pending, []
        claimed, self._claimed = self._claimed, set()
        self._pending_blocks.clear()
        for start in range(0, len(pending), self._parts.stored):
            blocks, slots = (list(each) for each in zip(*pending[start : start + self._parts.stored], strict=True))
            try:
                mark = self._copies.to_host(blocks, slots, goes_on=start > 0)
            except DeviceError as error:
                self._fail(error)
            else:
                self._storing.append((mark, blocks, slots))
                self._busy.update(dict.fromkeys(blocks, mark))
                self._storing_slots.update(dict.fromkeys(slots, mark))
                self.metrics.num_bytes[TO_HOST] += len(slots) * self._copies.slot_bytes
                start += len(slots)
                if not claimed.isdisjoint(blocks):
                    self._hold_steps(mark)
            if not self.is_up:
                for _, slot in pending[start:]:
                    self.pool.unpin(slot)
                return

    # -- back to the device ---------------------------------------------------------------------

    def begin_load(self, wanted: Sequence[PublishedBlock], tail: SavedTail | None = None) -> Load:
        """Begin to bring blocks into slots, and keep them there; it may be fewer than all.

        `submit_load` follows at once, with a block for each of its slots. The tail goes with it.
        """
        load = Load([], [])
        in_memory = [published.slot for published in wanted if published.slot != NOWHERE]
        for slot in in_memory:  # before a read can take the place of one
            self.pool.pin(slot)
        for published in wanted:
            if published.slot == NOWHERE and not self._begin_read(published):
                break
            self.pool.pin(published.slot)
            load.published.append(published)
            load.slots.append(published.slot)
        for slot in in_memory:
            self.pool.unpin(slot)
        if tail is not None:
            if len(load.slots) == len(wanted):
                load.published += [None] * len(tail.slots)
                load.slots += tail.slots
                tail.slots = []  # their pins are the load's
            self.drop_tail(tail)
        load.num_loaded = len(load.slots)
        return load

    def submit_load(self, load: Load, blocks: list[int]) -> None:
        """Have the load copied to these blocks, once all of it is in host memory."""
        load.blocks = blocks
        load.read_until = self._clock() + MAX_READ_SECONDS
        self.loads.append(load)
        self.submit()  # what these blocks held, and perhaps what they are to hold, is copied first
        try:
            self._advance(load, self._parts.before_step)
        except DeviceError as error:
            self._fail(error)

    def cancel(self, load: Load) -> None:
        """The sequence waits no longer, and its blocks may be used for others: see `claim`."""
        if not load.is_done and not load.is_cancelled:
            load.is_cancelled = True
            if not load.marks:
                self._end(load)
                self.loads.remove(load)

    # -- progress -------------------------------------------------------------------------------

    def poll(self, *, before_step: bool = False) -> None:
        """Take note of what is done, and go on with loads; `before_step`: others wait for a step meanwhile."""
        try:
            while self._storing and self._storing[0][0].query():
                self._end_store()
            self._settle_reads()
            self._advance_loads(self._parts.before_step if before_step else None)
        except DeviceError as error:
            self._fail(error)
        self.loads = [load for load in self.loads if not load.is_done]
        if self.disk is not None:
            for published in self.disk.settle():
                self._end_write(published)
            self._write_ahead(self.disk)

    def go_on(self, *, beside_prompts: bool) -> None:
        """Go on with loads while a step runs, with prompts or of decodes alone."""
        try:
            self._advance_loads(self._parts.beside_prompts if beside_prompts else self._parts.beside_decodes)
        except DeviceError as error:
            self._fail(error)

    def finish_copies(self) -> None:
        """Return when no copy uses blocks of the device any more; no sequence waits for one."""
        self.submit()
        try:
            for mark in self._marks():
                mark.synchronize()
        except DeviceError as error:
            self._fail(error)
        self.poll()

    def wait(self) -> None:
        """Let a little time pass for what is under way."""
        self._sleep(WAIT_SECONDS)

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()

    # -- inside ---------------------------------------------------------------------------------

    def _take_slot(self) -> int | None:
        slot, evicted = self.pool.take()
        if evicted is not None:
            self._leave_host(evicted)
        return slot

    def _keep(self, slot: int, published: PublishedBlock) -> None:
        """A slot from `_take_slot` is to hold a block."""
        other = self._by_digest.get(published.digest)
        if other is not None:  # unreachable, or another's with the same digest
            self.pool.drop(other)
        self.pool.keep(slot, published)
        self._by_digest[published.digest] = published

    def _leave_host(self, published: PublishedBlock) -> None:
        if self._by_digest.get(published.digest) is published:
            del self._by_digest[published.digest]

    def _hold_steps(self, mark: Mark) -> None:
        try:
            if not mark.query():
                self._copies.hold_steps(mark)
        except DeviceError as error:
            self._fail(error)

    def _copy_out(self, block: int, slot: int) -> None:
        self.pool.pin(slot)
        self._pending.append((block, slot))
        self._pending_blocks.add(block)

    def _end_store(self) -> None:
        mark, blocks, slots = self._storing.popleft()
        for block in blocks:
            if self._busy.get(block) is mark:
                del self._busy[block]
        for slot in slots:
            if self._storing_slots.get(slot) is mark:
                del self._storing_slots[slot]
            self.pool.unpin(slot)

    def _begin_read(self, published: PublishedBlock) -> bool:
        """Have a block read from disk into a slot; False if none is free."""
        if self.disk is None or not self.disk.is_readable or not published.on_disk:
            return False
        slot = self._take_slot()
        if slot is None:
            return False
        self._keep(slot, published)
        self.pool.pin(slot)
        self._reads[slot] = published, self.disk.read(published, self._copies.slot(slot))
        return True

    def _settle_reads(self) -> None:
        for slot, (published, read) in list(self._reads.items()):
            if not read.done():
                continue
            del self._reads[slot]
            assert self.disk is not None
            if not self.disk.check_read(published, read, self._copies.slot_bytes):
                for load in self.loads:
                    load.truncate(slot)
                if published.slot == slot:
                    self._leave_host(published)
                    self.pool.drop(published)
            self.pool.unpin(slot)

    def _marks(self) -> list[Mark]:
        """All that are passed once no copy is under way."""
        return [*(mark for mark, _, _ in self._storing), *(load.marks[-1] for load in self.loads if load.marks)]

    def _advance_loads(self, most: int | None) -> None:
        for load in self.loads:  # the first to begin is the first to end
            submitted = self._advance(load, most)
            if most is not None:
                most -= submitted

    def _advance(self, load: Load, most: int | None) -> int:
        """Submit at most so many blocks of a load, or find that it has ended; -> how many were submitted."""
        if load.is_done or (not load.marks and self._is_reading(load)):
            return 0
        count = load.num_unsubmitted if most is None else min(load.num_unsubmitted, most)
        if count:
            self._submit_part(load, count)
        if not load.num_unsubmitted and (not load.marks or load.marks[-1].query()):
            self._end(load)
        return count

    def _submit_part(self, load: Load, count: int) -> None:
        start, stop = load.num_submitted, load.num_submitted + count
        slots, blocks = load.slots[start:stop], load.blocks[start:stop]
        marks = [self._busy.get(block) for block in blocks] + [self._storing_slots.get(slot) for slot in slots]
        after = list({id(mark): mark for mark in marks if mark is not None}.values())
        # No step since the first part touches the blocks, which are the load's.
        mark = self._copies.to_device(slots, blocks, after, goes_on=start > 0)
        load.marks.append(mark)
        load.num_submitted = stop
        self._busy.update(dict.fromkeys(blocks, mark))
        self.metrics.num_bytes[TO_DEVICE] += count * self._copies.slot_bytes

    def _is_reading(self, load: Load) -> bool:
        """A file's thread still fills a slot of it; one that does not get on is waited for no longer."""
        unread = [slot for slot in load.slots[: load.num_loaded] if slot in self._reads]
        if unread and self._clock() > load.read_until and self.disk is not None:
            self.disk.note_stuck()
            load.truncate(unread[0])
            for slot, (published, _) in self._reads.items():  # so that no load waits for it again
                if published.slot == slot:
                    self._leave_host(published)
                    self.pool.drop(published)
            return False
        return bool(unread)

    def _end(self, load: Load) -> None:
        """Nothing of it is under way."""
        load.is_done = True
        ended = {id(mark) for mark in load.marks}
        for block in load.blocks:
            if id(self._busy.get(block)) in ended:
                del self._busy[block]
        for published, slot in zip(reversed(load.published), reversed(load.slots), strict=True):
            if published is not None and published.slot == slot:
                self.pool.mark_used(slot)  # the end of a prefix is evicted before its beginning
                if self.disk is not None:
                    self.disk.mark_used(published)
            self.pool.unpin(slot)

    def _write_ahead(self, disk: DiskTier) -> None:
        """Begin to write what host memory evicts next."""
        # No more than the disk keeps, or they would displace each other for ever.
        num_missing = min(WRITTEN_AHEAD, disk.max_blocks // 2) - len(self.pool.free)
        if num_missing <= 0 or not self.is_up:
            return
        for published in list(self.pool.oldest(num_missing)):
            slot = published.slot
            if not disk.can_write:
                return
            if published.on_disk or self.pool.pins[slot]:
                continue
            if disk.write(published, self._copies.slot(slot)):
                self._write_slots[slot] = published
                self.pool.pin(slot)

    def _end_write(self, published: PublishedBlock) -> None:
        slot = next(slot for slot, each in self._write_slots.items() if each is published)
        del self._write_slots[slot]
        self.pool.unpin(slot)

    def _fail(self, error: DeviceError) -> None:
        """Go on without: loads end with nothing, and nothing is found or kept any more."""
        if not self.is_up:
            return
        self.is_up = False
        self.metrics.failures["copy"] += 1
        logger.error("KV blocks are no longer kept in host memory: %s; prompts are computed instead", error)
        for mark in self._marks():
            try:
                mark.synchronize()
            except DeviceError:
                continue
        while self._storing:
            self._end_store()
        for load in self.loads:
            if not load.is_done:
                load.num_loaded = 0
                self._end(load)
        for _, slot in self._pending:
            self.pool.unpin(slot)
        self._pending.clear()
        self._pending_blocks.clear()
        self._claimed.clear()
        self._busy.clear()
        self._storing_slots.clear()
        for published in list(self.pool.kept.values()):
            self._leave_host(published)
            self.pool.drop(published)

    def _gauges(self) -> dict[str, dict[str, int]]:
        pool, disk = self.pool, self.disk
        blocks = {"host": pool.num_slots - len(pool.free)}
        capacity = {"host": pool.num_slots}
        up = {"host": int(self.is_up)}
        if disk is not None:
            blocks["disk"] = len(disk.entries)
            capacity["disk"] = disk.max_blocks
            up["disk"] = int(self.is_up and disk.is_writable)
        return {"blocks": blocks, "capacity_blocks": capacity, "up": up}
