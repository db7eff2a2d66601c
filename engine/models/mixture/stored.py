"""The weights of experts in a checkpoint, in the form that it stores them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.formats import BLOCK_FORMATS, PACKED_FORMATS, WeightFormat, WeightPart
from tessera.engine.formats.gguf_blocks import TYPES
from tessera.engine.gguf.block_parts import BlockRows, Bytes
from tessera.engine.models.partition import WHOLE, Share
from tessera.engine.models.registry.experts import ExpertForm
from tessera.engine.tensor import Tensor, uint8

Array = np.ndarray[Any, Any]

EXPERTS_UP, EXPERTS_DOWN = "experts_up", "experts_down"
MXFP4 = "MXFP4"
MXFP4_BLOCK = 32


def expert_names(
    form: ExpertForm, names: tuple[str, ...], spelt: Callable[[str], str], layer: int, num_experts: int
) -> tuple[str, ...]:
    """Of the tensors that names of a form stand for: those of an expert together."""
    if form.mxfp4 and not names[0].endswith("_bias"):
        names = tuple(name + suffix for name in names for suffix in ("_blocks", "_scales"))
    count = num_experts if "{e}" in names[0] else 1
    return tuple(spelt(name.format(i=layer, e=expert)) for expert in range(count) for name in names)


class ExpertMatrices(Protocol):
    """The same matrix of every expert of a layer, EXPERTS_UP or EXPERTS_DOWN; `part_rows` are those of one."""

    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def part_rows(self) -> tuple[int, ...]: ...
    @property
    def expert_rows(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...


class TensorSource(Protocol):
    """What a reader of a checkpoint's experts needs; see `CheckpointSource`."""

    @property
    def expert_form(self) -> ExpertForm: ...
    @property
    def on_cpu(self) -> bool: ...
    def spelt(self, name: str) -> str: ...
    def stored_values(self, name: str, expected: tuple[int, ...]) -> Any: ...
    def stored_bytes(self, name: str, expected: tuple[int, ...]) -> Array: ...
    def send_rows(self, source: Any, target: Tensor, name: str) -> None: ...
    def send_blocks(self, rows: BlockRows, format: WeightFormat) -> WeightPart: ...


class ExpertReader:
    """Reads one kind of matrices of one layer."""

    def __init__(self, source: TensorSource, field: ExpertMatrices, layer: int, share: Share = WHOLE) -> None:
        """`share`: a rank's part of each expert."""
        self.form = source.expert_form
        self._source = source
        self._field = field
        self._layer = layer
        self._share = share
        self._is_up = field.name == EXPERTS_UP

    def names(self, kind: Literal["weight", "bias"]) -> tuple[str, ...]:
        """Of all tensors."""
        return expert_names(self.form, self._stored(kind), self._source.spelt, self._layer, self._field.num_experts)

    def read_rows(self, target: Tensor) -> None:
        """The matrices of all experts to target [E * rows, columns]."""
        for start, values, name in self._pieces("weight"):
            self._source.send_rows(values, target[start : start + values.shape[0]], name)

    def read_bias(self, target: Tensor) -> None:
        """Their biases to target [E * rows]."""
        for start, values, name in self._pieces("bias"):
            self._source.send_rows(values, target[start : start + values.shape[0]], name)

    def mxfp4_part(self) -> WeightPart:
        """The matrices of all experts in their blocks."""
        source, field = self._source, self._field
        format: WeightFormat = BLOCK_FORMATS[MXFP4] if source.on_cpu else PACKED_FORMATS[MXFP4]
        blocks_name, scales_name = self.names("weight")
        if field.columns % MXFP4_BLOCK:
            raise ModelError(f"{blocks_name}: rows of {field.columns} numbers are not whole blocks of {MXFP4_BLOCK}")
        shape = (field.num_experts, field.expert_rows, field.columns // MXFP4_BLOCK)
        blocks, scales = source.stored_bytes(blocks_name, (*shape, 16)), source.stored_bytes(scales_name, shape)
        blocks, scales = blocks.reshape(field.rows, -1, 16), scales.reshape(field.rows, -1)
        if (columns := self._share.columns) is not None:
            chosen = slice(columns.start // MXFP4_BLOCK, columns.stop // MXFP4_BLOCK)
            blocks, scales = blocks[:, chosen], scales[:, chosen]
        rows = Mxfp4Rows(blocks, scales, self._row_order())
        return source.send_blocks(rows, format)

    def verify_share(self) -> None:
        """Raises: ValueError where a rank's part would take blocks apart."""
        columns = self._share.columns
        if self.form.mxfp4 and columns is not None and (columns.start % MXFP4_BLOCK or columns.stop % MXFP4_BLOCK):
            raise ValueError(f"columns {columns.start} to {columns.stop - 1} are not whole blocks of {MXFP4_BLOCK}")

    def _stored(self, kind: Literal["weight", "bias"]) -> tuple[str, ...]:
        form = self.form
        if kind == "bias":
            return form.up_bias if self._is_up else form.down_bias
        return form.up if self._is_up else form.down

    def _pieces(self, kind: Literal["weight", "bias"]) -> Iterator[tuple[int, Any, str]]:
        """Some rows of an expert: the first of them in the result, their values, the tensor's name."""
        field = self._field
        names = self.names(kind)
        stacked = "{e}" not in self._stored(kind)[0]
        counts = (field.expert_rows,) if len(self._stored(kind)) == 1 else field.part_rows
        columns = (field.columns,) if kind == "weight" else ()
        for number, name in enumerate(names):
            index = number % len(counts)
            shape = (counts[index], *columns)
            stored_shape = shape[::-1] if self.form.transposed else shape
            start = sum(counts[:index])
            if not stacked:
                yield from self._rows_of(
                    self._source.stored_values(name, stored_shape), number // len(counts), start, name
                )
                continue
            stored = self._source.stored_values(name, (field.num_experts, *stored_shape))
            if kind == "bias":
                stored = stored[:]
            assert isinstance(stored, np.ndarray), "matrices in blocks have a reader of their own"
            for expert in range(field.num_experts):
                yield from self._rows_of(stored[expert], expert, start, name)

    def _rows_of(self, values: Any, expert: int, start: int, name: str) -> Iterator[tuple[int, Any, str]]:
        field = self._field
        if self.form.transposed:
            values = values.T
        if not (self.form.interleaved and self._is_up):
            yield from self._own(values, expert, start, name)
            return
        parts = len(field.part_rows)
        for index in range(parts):
            yield from self._own(values[index::parts], expert, start + index * field.part_rows[0], name)

    def _own(self, values: Any, expert: int, start: int, name: str) -> Iterator[tuple[int, Any, str]]:
        """What the rank has of these rows of an expert, whose first is its row `start`."""
        share = self._share
        if (share.rows is not None or share.columns is not None) and not isinstance(values, np.ndarray):
            values = values[0 : values.shape[0]]
        if share.columns is not None and values.ndim == 2:
            values = values[:, share.columns]
        if share.rows is None:
            yield start + expert * self._field.expert_rows, values, name
            return
        begin = 0  # in the rank's rows of the expert
        for part, height in enumerate(self._field.part_rows):
            first = sum(self._field.part_rows[:part])
            inside = share.rows[(share.rows >= first) & (share.rows < first + height)]
            lowest, highest = max(int(inside[0]), start), min(int(inside[-1]) + 1, start + values.shape[0])
            if lowest < highest:
                row = begin + lowest - int(inside[0]) + expert * len(share.rows)
                yield row, values[lowest - start : highest - start], name
            begin += len(inside)

    def _row_order(self) -> Array | None:
        """Which stored row is each row of the result; None where they are all, in order."""
        field, share = self._field, self._share.rows
        if not (self.form.interleaved and self._is_up):
            if share is None:
                return None
            return np.asarray(np.arange(field.num_experts)[:, None] * field.expert_rows + share).ravel()
        rows = np.arange(field.rows).reshape(field.num_experts, -1, len(field.part_rows)).swapaxes(1, 2)
        by_expert = rows.reshape(field.num_experts, -1)
        return np.asarray(by_expert if share is None else by_expert[:, share]).ravel()


class Mxfp4Rows:
    """Rows of MXFP4 as checkpoints have them, in the blocks of GGUF: an exponent, then 16 bytes of 32 numbers.

    Byte j of a checkpoint's 16 has numbers 2 j and 2 j + 1, that of GGUF's j and j + 16, the first in the low half.
    """

    type = TYPES[MXFP4]

    def __init__(self, blocks: Array, scales: Array, order: Array | None) -> None:
        """blocks [R, B, 16] and scales [R, B] uint8; `order` [R] says which row comes where."""
        self.shape = (blocks.shape[0] if order is None else len(order), blocks.shape[1] * MXFP4_BLOCK)
        self._blocks, self._scales, self._order = blocks, scales, order

    def blocks(self, rows: slice) -> Bytes:
        """[n, bytes of a row] uint8"""
        chosen = rows if self._order is None else self._order[rows]
        stored, scales = self._blocks[chosen], self._scales[chosen]
        numbers = np.stack((stored & 15, stored >> 4), axis=-1).reshape(*stored.shape[:2], MXFP4_BLOCK)
        result = np.empty((*stored.shape[:2], 17), uint8)
        result[..., 0] = scales
        result[..., 1:] = numbers[..., :16] | numbers[..., 16:] << 4
        return result.reshape(len(result), -1)
