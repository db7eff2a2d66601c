"""The wire format of protocol buffers, as much of it as SentencePiece's files have.

Format: https://protobuf.dev/programming-guides/encoding/. Every length is checked, and nothing is recursive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | bytes
MAX_VARINT_BYTES = 10


def message_fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field in order: bytes where it has a length, else an integer of its bits.

    Raises: ValueError for what is no message.
    """
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if not key >> 3:
            raise ValueError("a field has the number 0")
        value: Value
        if kind == 0:
            value, place = _varint(data, place)
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value = int.from_bytes(_slice(data, place, width), "little")
            place += width
        elif kind == 2:
            length, place = _varint(data, place)
            value = _slice(data, place, length)
            place += length
        else:
            raise ValueError(f"a field has the wire type {kind}")
        yield key >> 3, value


def as_float(value: Value) -> float:
    """Of a field of four bytes."""
    if not isinstance(value, int):
        raise ValueError("a number has a length")
    return float(struct.unpack("<f", struct.pack("<I", value & 0xFFFFFFFF))[0])


def as_int32(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("a number has a length")
    low = value & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def as_text(value: Value) -> str:
    return as_bytes(value).decode()


def as_bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a text has no length")
    return value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for index in range(MAX_VARINT_BYTES):
        if place + index >= len(data):
            break
        byte = data[place + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, place + index + 1
    raise ValueError("a number does not end")


def _slice(data: bytes, place: int, length: int) -> bytes:
    if length > len(data) - place:
        raise ValueError("a field is longer than the file")
    return data[place : place + length]
