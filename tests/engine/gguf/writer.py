"""Writes GGUF files for tests: right ones, and wrong ones piece by piece."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.gguf.tensor_types import TENSOR_TYPES

TYPE_NUMBERS = {type.name: number for number, type in TENSOR_TYPES.items()}
ARRAY_KINDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


@dataclass(frozen=True)
class Stored:
    """A tensor as a file stores it: name of its type, shape with the contiguous dimension last, bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Stored:
        """Float32 as it is."""
        return cls("F32", values.shape, values.astype("<f4").tobytes())


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> tuple[int, bytes]:
    """The number of a value's type, and its bytes: int becomes uint32, float float32, a list an array."""
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 2**32 else (11, struct.pack("<q", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, (str, bytes)):
        return 8, string(value)
    if isinstance(value, np.ndarray):
        kind = ARRAY_KINDS[value.dtype.str[1:]]
        return 9, struct.pack("<IQ", kind, len(value)) + value.tobytes()
    items = [_typed(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0] if items else 8, len(items)) + b"".join(raw for _, raw in items)


def pair(key: str, value: Any) -> bytes:
    kind, raw = _typed(value)
    return string(key) + struct.pack("<I", kind) + raw


def entry(name: str, type_number: int, shape: tuple[int, ...], offset: int) -> bytes:
    """The description of one tensor."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return string(name) + dimensions + struct.pack("<IQ", type_number, offset)


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored] | None = None, version: int = 3) -> bytes:
    """A whole file."""
    alignment = metadata.get("general.alignment", 32)
    entries, data = b"", b""
    for name, tensor in (tensors or {}).items():
        data += b"\0" * (-len(data) % alignment)
        entries += entry(name, TYPE_NUMBERS[tensor.type], tensor.shape, len(data))
        data += tensor.data
    front = header(len(tensors or {}), len(metadata), version)
    front += b"".join(pair(key, value) for key, value in metadata.items()) + entries
    return front + b"\0" * (-len(front) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored] | None = None) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path
