"""Rows of quantised blocks on their way to the device, as they are stored or packed for its kernels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tessera.engine.formats import PackedFormat, WeightPart
from tessera.engine.gguf.block_parts import Bytes
from tessera.engine.gguf.tensor_types import TensorType
from tessera.engine.models.weights.stream import CHUNK_BYTES, WeightStream
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, empty, uint8

STAGED_BYTES = 4 * CHUNK_BYTES  # of blocks that wait on the device to be packed
MOST_STAGED = 2


class BlockRows(Protocol):
    """A stored matrix [rows, columns], or several of one width on top of each other."""

    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]: ...

    def blocks(self, rows: slice) -> Bytes: ...


class BlockUpload:
    """Sends rows to parts in block formats; where the format is packed the device packs them."""

    def __init__(self, ops: Ops, stream: WeightStream) -> None:
        self._ops = ops
        self._stream = stream
        self._staged: deque[tuple[Tensor, Callable[[], None]]] = deque()  # memory, and the packing of what lies in it

    def send(self, stored: BlockRows, rows: slice, part: WeightPart, first: int) -> None:
        """These rows of a matrix to those of a part from `first` on."""
        if isinstance(part.format, PackedFormat):
            self._pack(stored, rows, part, first)
        else:
            (target,) = part.tensors.values()
            self._send_blocks(stored, rows, target[first : first + rows.stop - rows.start])

    def _send_blocks(self, stored: BlockRows, rows: slice, target: Tensor) -> None:
        step = max(CHUNK_BYTES // target.shape[1], 1)
        for start in range(0, target.shape[0], step):
            end = min(start + step, target.shape[0])
            self._stream.send(target[start:end], partial(stored.blocks, slice(rows.start + start, rows.start + end)))

    def _pack(self, stored: BlockRows, rows: slice, part: WeightPart, first: int) -> None:
        """By way of memory in which the device packs them."""
        row_bytes = stored.type.row_bytes(stored.shape[-1])
        step = max(STAGED_BYTES // row_bytes, 1)
        for start in range(rows.start, rows.stop, step):
            piece = slice(start, min(start + step, rows.stop))
            memory = self._staging_memory(row_bytes)
            blocks = Tensor(memory.buffer, (piece.stop - piece.start, row_bytes), uint8, memory.offset)
            pack = partial(self._ops.pack_blocks, blocks, part, first + start - rows.start)
            self._send_blocks(stored, piece, blocks)
            self._stream.call_after(pack)
            self._staged.append((memory, pack))

    def _staging_memory(self, row_bytes: int) -> Tensor:
        """Memory for stored rows: new, or once enough is in use the piece whose packing began first."""
        if len(self._staged) < MOST_STAGED:
            return empty((max(STAGED_BYTES, row_bytes),), uint8, self._ops.device)
        memory, pack = self._staged.popleft()
        self._stream.wait_for(pack)
        return memory if memory.nbytes >= row_bytes else empty((row_bytes,), uint8, self._ops.device)
