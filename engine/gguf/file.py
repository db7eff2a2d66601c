"""One GGUF file, memory-mapped, with every offset, count and length checked before it is used.

Layout: `GGUF`, version, number of tensors and of keys; keys and values; name, dimensions, type and offset of each
tensor; padding; the tensors' bytes (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import itertools
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.contract.lfs import POINTER_ERROR, is_lfs_pointer
from tessera.engine.gguf.cursor import Cursor, array_at
from tessera.engine.gguf.metadata import Metadata, read_metadata
from tessera.engine.gguf.tensor_types import TENSOR_TYPES, UNSUPPORTED_TYPES, TensorType

Array = np.ndarray[Any, Any]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
MAX_TENSORS = 2**16
MAX_TENSOR_NAME_BYTES = 256
MAX_DIMENSIONS = 4
SMALLEST_ENTRY = 8 + 4 + 8 + 4 + 8  # bytes of an empty name, one dimension, type and offset
BYTE = np.dtype(np.uint8)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor; `shape` has the contiguous dimension last, `begin` counts from the start of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class GGUFFile:
    """The tensors and metadata of one file; nothing is copied.

    Raises: ModelError naming the file, and the key or tensor at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        cursor = Cursor(path, self._map, 0)
        num_tensors, num_keys = _read_counts(cursor)
        self.metadata: Metadata = read_metadata(cursor, num_keys)
        self.tensors = _read_tensors(cursor, num_tensors, _alignment(self.metadata))

    def stored(self, info: TensorInfo) -> Array:
        """The bytes of one of its tensors, [rows, bytes of a row] uint8, as a read-only view."""
        row_bytes = info.type.row_bytes(info.shape[-1])
        return array_at(self._map, BYTE, info.nbytes, info.begin).reshape(-1, row_bytes)


def _read_counts(cursor: Cursor) -> tuple[int, int]:
    """Numbers of tensors and keys, after magic and version."""
    path, data = cursor.path, cursor.data
    if is_lfs_pointer(bytes(data[:64])):
        raise ModelError(f"{path} {POINTER_ERROR}")
    start = cursor.skip(len(MAGIC), "its magic number")
    magic = data[start : start + len(MAGIC)]
    if magic != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
    version = cursor.u32("its version")
    if version in VERSIONS:
        return cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ModelError(f"{path} is a big-endian GGUF file; only little-endian ones are read")
    raise ModelError(f"{path} is a GGUF file of version {version}; versions 2 and 3 are read")


def _alignment(metadata: Metadata) -> int:
    key = "general.alignment"
    alignment = metadata.integer(key, 8, MAX_ALIGNMENT, DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        metadata.refuse(key, f"a power of two from 8 to {MAX_ALIGNMENT}")
    return alignment


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    path = cursor.path
    if count > MAX_TENSORS:
        raise ModelError(f"{path}: its header claims {count} tensors, more than the {MAX_TENSORS} accepted")
    if count * SMALLEST_ENTRY > cursor.remaining:
        raise ModelError(f"{path} is truncated: its header claims {count} tensors, {cursor.remaining} bytes are left")
    entries = [_read_entry(cursor, index) for index in range(count)]
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, type, shape, offset in entries:
        where = f"{path}: tensor {name!r}"
        if name in tensors:
            raise ModelError(f"{where} occurs twice")
        if offset % alignment:
            raise ModelError(f"{where} begins at offset {offset}, which is not a multiple of the alignment {alignment}")
        nbytes = math.prod(shape[:-1]) * type.row_bytes(shape[-1])
        if start + offset + nbytes > len(cursor.data):
            raise ModelError(
                f"{where} ends at byte {start + offset + nbytes}, but the file has {len(cursor.data)}: "
                "it is truncated or malformed"
            )
        tensors[name] = TensorInfo(name, type, shape, start + offset, nbytes)
    _refuse_overlaps(path, tensors)
    return tensors


def _read_entry(cursor: Cursor, index: int) -> tuple[str, TensorType, tuple[int, ...], int]:
    """Name, type, shape and offset of a tensor."""
    name = cursor.name(MAX_TENSOR_NAME_BYTES, f"the name of tensor {index}")
    where = f"{cursor.path}: tensor {name!r}"
    num_dimensions = cursor.u32(f"tensor {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ModelError(f"{where} has {num_dimensions} dimensions; it must have 1 to {MAX_DIMENSIONS}")
    shape = cursor.u64s(num_dimensions, f"tensor {name!r}")[::-1]
    number = cursor.u32(f"tensor {name!r}")
    offset = cursor.u64(f"tensor {name!r}")
    if number not in TENSOR_TYPES:
        known = UNSUPPORTED_TYPES.get(number)
        supported = ", ".join(type.name for type in TENSOR_TYPES.values())
        called = f"stored as {known}, which is not supported" if known else f"of the unknown type {number}"
        raise ModelError(f"{where} is {called}; supported are {supported}")
    type = TENSOR_TYPES[number]
    if not all(shape) or math.prod(shape) >= 2**63:
        raise ModelError(f"{where} has the impossible shape {list(shape)}")
    if shape[-1] % type.block_size:
        raise ModelError(
            f"{where} has rows of {shape[-1]} elements, but {type.name} takes multiples of {type.block_size}"
        )
    return name, type, shape, offset


def _refuse_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    placed = sorted((info.begin, info.begin + info.nbytes, name) for name, info in tensors.items())
    for (_, end, first), (begin, _, second) in itertools.pairwise(placed):
        if begin < end:
            raise ModelError(f"{path}: the tensors {first!r} and {second!r} overlap")
