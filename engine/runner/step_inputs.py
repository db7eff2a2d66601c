"""A step's arrays in device memory, padded to the shape of a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.contract.sampling_row import PADDING_ROW, ROW_BYTES, SAMPLING_ROW
from tessera.engine.core.step_batch import StepBatch, TableUpdates
from tessera.engine.formats import AdapterRows
from tessera.engine.models.decoder import StepAdapters
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.tensor import Tensor, int32

Array = np.ndarray[Any, Any]

NO_MORE: Mapping[str, int] = MappingProxyType({})
NOTHING = np.empty(0, np.int32)
NOTHING.flags.writeable = False
NO_UPDATES = TableUpdates(*(NOTHING for _ in fields(TableUpdates)))


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step's arrays: tokens, sequences and sampled rows, and whether it verifies drafts and does no more.

    A decode has one token a sequence and samples each; only its sizes matter to what is launched. A step that verifies
    has a token and its draft, if any, of each sequence, and samples behind every token.
    """

    num_tokens: int
    num_seqs: int
    num_sampled: int
    verifies: bool = False

    @classmethod
    def of(cls, batch: StepBatch) -> StepShape:
        return cls(batch.num_tokens, batch.num_seqs, batch.num_sampled, batch.verifies)

    @property
    def is_decode(self) -> bool:
        # Padded to a graph, a step that verifies has room for a row a token, but its rows have several.
        return self.num_tokens == self.num_seqs == self.num_sampled and not self.verifies


class Place(NamedTuple):
    """Where an array of a step lies in an upload.

    Attributes:
        group: the part of StepBatch that has it, "" for StepBatch itself, "more" for what it has not.
        offset: in bytes.
        padding: its value in rows and tokens that the batch does not have.
    """

    group: str
    name: str
    offset: int
    length: int
    dtype: np.dtype[Any]
    padding: int | bytes

    @property
    def end(self) -> int:
        return self.offset + self.length * self.dtype.itemsize


class StepInputs:
    """Where each array of a step of one shape lies in an upload.

    Attributes:
        input_ids [T], logits_indices [S], slots [S], attention: tensors, valid once submitted; attention's maxima are
            those given here.
        sampling_rows [S] SAMPLING_ROW: likewise.
        last_attention: attention metadata of the sampled tokens alone, a row of one query each, with stored keys.
        adapters: of the tokens, and of the sampled ones; None where the model has no slots for them.
        updates: the rows, columns and blocks [R] of as many of the batch's table updates; None: it never has any.
        sampled: of a graph that reads other tokens than those sampled last, in their form; else None.
        more: int32 tensors by name, of what a kind of runner needs beside a batch.
        nbytes: of all arrays.
    """

    def __init__(
        self,
        upload: StepUpload,
        shape: StepShape,
        block_tables: Tensor,
        numbers: Tensor,
        *,
        max_seqlen_q: int,
        max_context_len: int,
        adapter_groups: Sequence[Tensor] = (),
        more: Mapping[str, int] = NO_MORE,
        first: int = 0,
    ) -> None:
        """`numbers` [N] int32 are 0, 1, ... N - 1, with N > S. `adapter_groups`: room for the groups of tokens, and of
        sampled ones, where the model has slots for adapters. `more`: lengths of further arrays, whose padding is -1.
        `first`: byte of the upload where the arrays begin, for several batches in one."""
        self.shape = shape
        self._upload = upload
        self._places = _places(shape, bool(adapter_groups), more, first)
        self._views: dict[int, list[_View]] = {}  # of each stage of the upload
        self.nbytes = aligned(self._places[-1].end) - first
        tensors = {
            (place.group, place.name): Tensor(upload.buffer, (place.length,), place.dtype, place.offset)
            for place in self._places
        }
        self.input_ids = tensors["", "input_ids"]
        self.logits_indices = tensors["", "logits_indices"]
        self.sampling_rows = tensors["sampling", "row_bytes"]
        self.slots = tensors["sampling", "slots"]
        self.attention = AttentionMetadata(
            positions=tensors["", "positions"],
            slot_mapping=tensors["", "slot_mapping"],
            block_tables=block_tables,
            table_rows=tensors["", "table_rows"],
            cu_seqlens_q=tensors["", "cu_seqlens_q"],
            context_lens=tensors["", "context_lens"],
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
            verifies=shape.verifies,
        )
        # A sampled row's slot is its place in the tables, and the position of what it samples its length so far.
        positions = tensors["sampling", "positions"]
        self.last_attention = AttentionMetadata(
            positions=positions,
            slot_mapping=self.slots,  # not looked at
            block_tables=block_tables,
            table_rows=self.slots,
            cu_seqlens_q=numbers[: shape.num_sampled + 1],
            context_lens=positions,
            max_seqlen_q=1,
            max_context_len=max_context_len,
        )
        self.adapters: StepAdapters | None = None
        if adapter_groups:
            rows = AdapterRows(tensors["", "token_adapters"], adapter_groups[0])
            chosen = rows if shape.is_decode else AdapterRows(tensors["", "chosen_adapters"], adapter_groups[1])
            self.adapters = StepAdapters(rows, chosen)
        self.sampled: Tensor | None = None
        self.more = {name: tensors["more", name] for name in more}
        self.updates: tuple[Tensor, Tensor, Tensor] | None = (
            tensors["table_updates", "rows"],
            tensors["table_updates", "columns"],
            tensors["table_updates", "blocks"],
        )

    def submit(self, batch: StepBatch, updates: TableUpdates | None, more: object = None) -> None:
        """Send the arrays of a batch of at most this shape to the device, with at most R table updates; `more` has the
        further ones as attributes."""
        number, stage = self._upload.next_stage()
        self.write(batch, updates, more, number, stage, is_own=self._upload.take_stage(self))
        self._upload.submit(self.nbytes)

    def write(
        self, batch: StepBatch, updates: TableUpdates | None, more: object, number: int, stage: Array, *, is_own: bool
    ) -> None:
        """Write them to this stage of the upload; `is_own`: nobody else has written there since these inputs did."""
        views = self._views.get(number)
        if views is None:
            views = self._views[number] = [
                _View(each, stage[each.offset : each.end].view(_copied_as(each.dtype))) for each in self._places
            ]
        sources = {"": batch, "sampling": batch.sampling, "table_updates": updates or NO_UPDATES, "more": more}
        for view in views:
            values = getattr(sources[view.group], view.name)
            if is_own and values is view.values:
                continue
            count, array = len(values), view.array
            if count:
                array[:count] = values
            if count < view.length:
                if view.name == "cu_seqlens_q":
                    shape = self.shape
                    array[count:] = starts_of_padding(
                        batch.num_tokens, shape.num_tokens, shape.num_seqs - batch.num_seqs
                    )
                elif count < (filled := view.num_filled if is_own else view.length):
                    array[count:filled] = view.padding
            view.num_filled = count
            view.values = None if values.flags.writeable else values


class _View:
    """A place in a stage's memory.

    Attributes:
        num_filled: elements that are not padding, as long as nobody else has written to the stage.
        values: what they are, where that cannot change and stands for the padding too: a layout of drafts, which
            comes again and again.
    """

    __slots__ = ("array", "group", "length", "name", "num_filled", "padding", "values")

    def __init__(self, place: Place, array: Array) -> None:
        self.group, self.name, self.length, self.padding = place.group, place.name, place.length, place.padding
        self.array = array
        self.num_filled = place.length
        self.values: Array | None = None


@lru_cache(maxsize=1024)
def starts_of_padding(num_tokens: int, room: int, num_rows: int) -> Array:
    """[num_rows] behind the first of `room` tokens: each row of padding takes one token of padding, and the last what
    is left."""
    starts = np.minimum(num_tokens + np.arange(1, num_rows + 1, dtype=np.int32), np.int32(room))
    starts[-1] = room
    starts.flags.writeable = False  # it is shared
    return starts


def inputs_bytes(shape: StepShape, has_adapters: bool = False, more: Mapping[str, int] = NO_MORE) -> int:
    """Memory that an upload of this shape takes."""
    return aligned(_places(shape, has_adapters, more)[-1].end)


def _places(shape: StepShape, has_adapters: bool, more: Mapping[str, int], first: int = 0) -> list[Place]:
    places: list[Place] = []

    def append(group: str, name: str, length: int, dtype: np.dtype[Any] = int32, padding: int | bytes = 0) -> None:
        offset = aligned(places[-1].end) if places else first
        places.append(Place(group, name, offset, length, dtype, padding))

    append("", "input_ids", shape.num_tokens)
    append("", "positions", shape.num_tokens)
    append("", "slot_mapping", shape.num_tokens, padding=-1)
    append("", "table_rows", shape.num_seqs)
    append("", "cu_seqlens_q", shape.num_seqs + 1)
    append("", "context_lens", shape.num_seqs)
    append("", "logits_indices", shape.num_sampled)
    append("sampling", "slots", shape.num_sampled, padding=-1)
    append("sampling", "positions", shape.num_sampled)
    append("sampling", "row_bytes", shape.num_sampled, SAMPLING_ROW, PADDING_ROW.tobytes())
    for name, padding in (("rows", -1), ("columns", 0), ("blocks", 0)):
        append("table_updates", name, shape.num_seqs, padding=padding)
    if has_adapters:
        append("", "token_adapters", shape.num_tokens, padding=-1)
        append("", "chosen_adapters", shape.num_sampled, padding=-1)
    for name, length in more.items():
        append("more", name, length, padding=-1)
    return places


def _copied_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return ROW_BYTES if dtype == SAMPLING_ROW else dtype
