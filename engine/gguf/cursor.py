"""A place in a mapped file from which numbers and strings are read, never beyond its end."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ModelError

MAX_STRING_BYTES = 16 * 2**20
MAX_ITEMS = 2**24  # strings and arrays in a header, which are gone over one by one

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class Cursor:
    """Reads little-endian values one after the other.

    Raises: ModelError naming the file and what did not fit.
    """

    def __init__(self, path: Path, data: mmap.mmap, offset: int) -> None:
        self.path = path
        self.data = data
        self.offset = offset
        self._items_left = MAX_ITEMS

    @property
    def remaining(self) -> int:
        return len(self.data) - self.offset

    def u32(self, of: str) -> int:
        return self._number(U32, of)

    def u64(self, of: str) -> int:
        return self._number(U64, of)

    def u64s(self, count: int, of: str) -> tuple[int, ...]:
        start = self.skip(8 * count, of)
        return struct.unpack_from(f"<{count}Q", self.data, start)

    def name(self, most: int, of: str) -> str:
        """A string of at most `most` bytes of UTF-8."""
        length = self.u64(of)
        if length > most:
            raise ModelError(f"{self.path}: {of} claims {length} bytes, more than the {most} accepted")
        start = self.skip(length, of)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {of} is not valid UTF-8") from None

    def skip(self, nbytes: int, of: str) -> int:
        """Go over `nbytes`; returns where they begin."""
        start = self.offset
        if nbytes > self.remaining:
            raise ModelError(
                f"{self.path} is truncated: {of} needs {nbytes} bytes at byte {start}, the file has {len(self.data)}"
            )
        self.offset = start + nbytes
        return start

    def skip_strings(self, count: int, of: str) -> int:
        """Go over `count` strings; returns where the first begins."""
        first = self.offset
        if 8 * count > self.remaining:
            raise ModelError(f"{self.path} is truncated: {of} claims {count} strings, {self.remaining} bytes are left")
        self.count_items(count, of)
        data, offset, end, unpack = self.data, first, len(self.data), U64.unpack_from
        for index in range(count):
            if offset + 8 > end:
                raise ModelError(f"{self.path} is truncated in string {index} of {of}")
            (length,) = unpack(data, offset)
            if length > MAX_STRING_BYTES:
                raise ModelError(
                    f"{self.path}: string {index} of {of} claims {length} bytes, "
                    f"more than the {MAX_STRING_BYTES} accepted"
                )
            offset += 8 + length
        if offset > end:
            raise ModelError(f"{self.path} is truncated in the last string of {of}")
        self.offset = offset
        return first

    def count_items(self, count: int, of: str) -> None:
        """Refuse a header with more strings and arrays than it is reasonable to go over."""
        if count > self._items_left:
            raise ModelError(f"{self.path}: {of} brings the header to more than the {MAX_ITEMS} strings accepted")
        self._items_left -= count

    def _number(self, form: struct.Struct, of: str) -> int:
        start = self.skip(form.size, of)
        number: int = form.unpack_from(self.data, start)[0]
        return number


def strings_at(data: mmap.mmap, count: int, offset: int) -> Iterator[bytes]:
    """Strings that were gone over before."""
    unpack = U64.unpack_from
    for _ in range(count):
        begin = offset + 8
        offset = begin + unpack(data, offset)[0]
        yield data[begin:offset]


def string_places(data: mmap.mmap, count: int, offset: int) -> Iterator[tuple[int, int]]:
    """Where each string of `strings_at` begins and ends."""
    unpack = U64.unpack_from
    for _ in range(count):
        begin = offset + 8
        offset = begin + unpack(data, offset)[0]
        yield begin, offset


def array_at(data: mmap.mmap, dtype: np.dtype[Any], count: int, offset: int) -> np.ndarray[Any, Any]:
    """A read-only view of the file's bytes."""
    return np.frombuffer(data, dtype, count, offset) if count else np.empty(0, dtype)
