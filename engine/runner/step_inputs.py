"""A step's arrays in the device's memory, padded to a shape that a recorded step can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tessera.engine.core.step_batch import StepBatch, TableUpdates
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.ops.sampling_interface import SamplingMetadata
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.tensor import Tensor, float32, int32, uint64

Array = np.ndarray[Any, Any]

SAMPLING_DTYPES: dict[str, np.dtype[Any]] = {
    "seeds": uint64,
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"), float32
    ),
}
# What a row of padding holds where it is not 0: it is stored nowhere and samples greedily for nobody.
PADDING: dict[str, int] = {"slot_mapping": -1, "slots": -1, "rows": -1, "top_p": 1, "repetition_penalty": 1}


NO_UPDATES = TableUpdates(*(np.empty(0, np.int32) for _ in fields(TableUpdates)))


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step's arrays: tokens, sequences and sampled rows.

    A decode has one token a sequence and samples each; only its sizes matter to what is launched.
    """

    num_tokens: int
    num_seqs: int
    num_sampled: int

    @classmethod
    def of(cls, batch: StepBatch) -> StepShape:
        return cls(batch.num_tokens, batch.num_seqs, batch.num_sampled)

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_seqs == self.num_sampled


class StepInputs:
    """Where each array of a step of one shape lies in an upload.

    Attributes:
        input_ids [T], logits_indices [S], slots [S], attention, sampling: tensors, valid once
            submitted; attention's maxima are those given here.
        last_attention: of the sampled tokens alone, a row of one query each, whose keys are stored.
        updates: the rows, columns and blocks [R] of as many of the batch's table updates.
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
    ) -> None:
        """`numbers` [N] int32 are 0, 1, ... N - 1, with N > S."""
        self.shape = shape
        self._upload = upload
        self._places: list[tuple[str, str, int, int, np.dtype[Any]]] = []
        self._views: dict[int, list[tuple[str, str, Array]]] = {}
        tensors: dict[str, Tensor] = {}
        sampling: dict[str, Tensor] = {}
        updates: dict[str, Tensor] = {}
        groups = {"": tensors, "sampling": sampling, "table_updates": updates}
        offset = 0
        for group, name, length, dtype in _arrays(shape):
            self._places.append((group, name, offset, length, dtype))
            groups[group][name] = Tensor(upload.buffer, (length,), dtype, offset)
            offset = aligned(offset + length * dtype.itemsize)
        self.nbytes = offset
        self.input_ids = tensors["input_ids"]
        self.logits_indices = tensors["logits_indices"]
        self.attention = AttentionMetadata(
            positions=tensors["positions"],
            slot_mapping=tensors["slot_mapping"],
            block_tables=block_tables,
            table_rows=tensors["table_rows"],
            cu_seqlens_q=tensors["cu_seqlens_q"],
            context_lens=tensors["context_lens"],
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
        )
        self.sampling = SamplingMetadata(**sampling)
        self.slots = self.sampling.slots
        # A sampled row's slot is its place in the tables, and the position of what it samples its length so far.
        self.last_attention = AttentionMetadata(
            positions=self.sampling.positions,
            slot_mapping=self.sampling.slots,  # not looked at
            block_tables=block_tables,
            table_rows=self.sampling.slots,
            cu_seqlens_q=numbers[: shape.num_sampled + 1],
            context_lens=self.sampling.positions,
            max_seqlen_q=1,
            max_context_len=max_context_len,
        )
        self.updates = updates["rows"], updates["columns"], updates["blocks"]

    def submit(self, batch: StepBatch, updates: TableUpdates | None) -> None:
        """Send the arrays of a batch of at most this shape to the device, with at most R table updates."""
        number, stage = self._upload.stage()
        views = self._views.get(number)
        if views is None:
            views = self._views[number] = [
                (group, name, stage[offset : offset + length * dtype.itemsize].view(dtype))
                for group, name, offset, length, dtype in self._places
            ]
        sources = {"": batch, "sampling": batch.sampling, "table_updates": updates or NO_UPDATES}
        for group, name, view in views:
            values = getattr(sources[group], name)
            count = len(values)
            view[:count] = values
            if count < len(view):
                view[count:] = PADDING.get(name, 0) if name != "cu_seqlens_q" else self._starts_of_padding(batch)
        self._upload.submit(self.nbytes)

    def _starts_of_padding(self, batch: StepBatch) -> Array:
        """Each row of padding takes one token of padding, and the last what is left."""
        rows = np.arange(1, self.shape.num_seqs - batch.num_seqs + 1, dtype=np.int32)
        starts = np.minimum(batch.num_tokens + rows, self.shape.num_tokens)
        starts[-1] = self.shape.num_tokens
        return starts


def _arrays(shape: StepShape) -> Iterator[tuple[str, str, int, np.dtype[Any]]]:
    """What of a StepBatch they are a part of, names, lengths and dtypes."""
    for name in ("input_ids", "positions", "slot_mapping"):
        yield "", name, shape.num_tokens, int32
    yield "", "table_rows", shape.num_seqs, int32
    yield "", "cu_seqlens_q", shape.num_seqs + 1, int32
    yield "", "context_lens", shape.num_seqs, int32
    yield "", "logits_indices", shape.num_sampled, int32
    for field in fields(SamplingMetadata):
        yield "sampling", field.name, shape.num_sampled, SAMPLING_DTYPES.get(field.name, int32)
    for field in fields(TableUpdates):
        yield "table_updates", field.name, shape.num_seqs, int32


def inputs_bytes(shape: StepShape) -> int:
    """Memory that an upload of this shape takes."""
    return sum(aligned(length * dtype.itemsize) for _, _, length, dtype in _arrays(shape))
