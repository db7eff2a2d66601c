"""The keys and values at the beginning of a GGUF file.

The values stay in the file: a header is gone over once, with every length checked, and a value is decoded when it
is asked for.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tessera.engine.contract.errors import ModelError
from tessera.engine.gguf.cursor import Cursor, array_at, string_places, strings_at

Array = np.ndarray[Any, Any]

MAX_KEYS = 2**14
MAX_KEY_BYTES = 2**16 - 1
MAX_NESTING = 4
MAX_SHOWN = 60
SMALLEST_PAIR = 8 + 4 + 1  # bytes of an empty key, a type and a value

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True)
class _Value:
    """Where a value lies; `count` is None where it is no array, else `kind` is its elements'."""

    kind: int
    offset: int
    count: int | None = None


class Metadata:
    """Checked access to a file's metadata. Every reader raises ModelError naming file, key and what is accepted."""

    def __init__(self, path: Path, data: mmap.mmap, values: dict[str, _Value]) -> None:
        self.path = path
        self._data = data
        self._values = values

    @property
    def keys(self) -> set[str]:
        return set(self._values)

    def has(self, key: str) -> bool:
        return key in self._values

    def refuse(self, key: str, accepted: str) -> NoReturn:
        if key not in self._values:
            raise ModelError(f"{self.path}: {key} is missing; it must be {accepted}")
        raise ModelError(f"{self.path}: {key} must be {accepted}, not {self._shown(key)}")

    def scalar(self, key: str) -> int | float | bool | str | None:
        """A value that is no array; None where it is missing or an array."""
        value = self._values.get(key)
        if value is None or value.count is not None:
            return None
        if value.kind == STRING:
            raw = next(strings_at(self._data, 1, value.offset))
            try:
                return str(raw, "utf-8")
            except UnicodeDecodeError:
                raise ModelError(f"{self.path}: {key} is not valid UTF-8") from None
        number = array_at(self._data, NUMBERS[value.kind], 1, value.offset)[0].item()
        if value.kind == BOOL:
            return number != 0 if number in (0, 1) else None
        return number  # type: ignore[no-any-return]

    def is_array(self, key: str) -> bool:
        value = self._values.get(key)
        return value is not None and value.count is not None

    def string(self, key: str, default: str | None = None) -> str:
        if key not in self._values and default is not None:
            return default
        value = self.scalar(key)
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        if key not in self._values and default is not None:
            return default
        value = self.scalar(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        if key not in self._values and default is not None:
            return default
        value = self.scalar(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        if key not in self._values and default is not None:
            return default
        value = self.scalar(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def strings(self, key: str, most: int) -> list[str]:
        """An array of at most `most` strings; a file does not bound the memory they take, so ask for no more."""
        value = self._values.get(key)
        if value is None or value.count is None or value.kind != STRING or value.count > most:
            self.refuse(key, f"an array of at most {most} strings")
        try:
            return [str(raw, "utf-8") for raw in strings_at(self._data, value.count, value.offset)]
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {key} has a string that is not valid UTF-8") from None

    def length(self, key: str) -> int:
        """Of an array."""
        value = self._values.get(key)
        if value is None or value.count is None:
            self.refuse(key, "an array")
        return value.count

    def some_strings(self, key: str, indices: Collection[int]) -> dict[int, str]:
        """The strings of an array that have these indices; a third of the time of all strings where they are few."""
        value = self._values.get(key)
        if value is None or value.count is None or value.kind != STRING:
            self.refuse(key, "an array of strings")
        wanted = set(indices)
        try:
            return {
                index: str(self._data[begin:end], "utf-8")
                for index, (begin, end) in enumerate(string_places(self._data, value.count, value.offset))
                if index in wanted
            }
        except UnicodeDecodeError:
            raise ModelError(f"{self.path}: {key} has a string that is not valid UTF-8") from None

    def numbers(self, key: str) -> Array:
        """An array of numbers of any type, as it lies in the file."""
        value = self._values.get(key)
        if value is None or value.count is None or value.kind not in NUMBERS or value.kind == BOOL:
            self.refuse(key, "an array of numbers")
        return array_at(self._data, NUMBERS[value.kind], value.count, value.offset)

    def integers(self, key: str) -> Array:
        found = self.numbers(key)
        if found.dtype.kind not in "iu":
            self.refuse(key, "an array of integers")
        return found

    def booleans(self, key: str) -> Array:
        value = self._values.get(key)
        if value is None or value.count is None or value.kind != BOOL:
            self.refuse(key, "an array of true and false")
        flags: Array = array_at(self._data, NUMBERS[BOOL], value.count, value.offset) != 0
        return flags

    def _shown(self, key: str) -> str:
        value = self._values[key]
        if value.count is not None:
            return f"an array of {value.count}"
        text = repr(self.scalar(key))
        return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """Go over `count` pairs of key and value."""
    path = cursor.path
    if count > MAX_KEYS:
        raise ModelError(f"{path}: its header claims {count} keys, more than the {MAX_KEYS} accepted")
    if count * SMALLEST_PAIR > cursor.remaining:
        raise ModelError(f"{path} is truncated: its header claims {count} keys, {cursor.remaining} bytes are left")
    values: dict[str, _Value] = {}
    for index in range(count):
        key = cursor.name(MAX_KEY_BYTES, f"the name of key {index}")
        shown = key if len(key) <= MAX_SHOWN else key[: MAX_SHOWN - 3] + "..."
        if key in values:
            raise ModelError(f"{path}: the key {shown!r} occurs twice")
        values[key] = _read_value(cursor, repr(shown))
    return Metadata(path, cursor.data, values)


def _read_value(cursor: Cursor, key: str) -> _Value:
    kind = cursor.u32(f"the type of {key}")
    if kind != ARRAY:
        return _Value(kind, _skip_items(cursor, kind, 1, key))
    kind, count = cursor.u32(f"the type of {key}"), cursor.u64(f"the length of {key}")
    return _Value(kind, _skip_items(cursor, kind, count, key), count)


def _skip_items(cursor: Cursor, kind: int, count: int, key: str, depth: int = 1) -> int:
    """Go over `count` values of one type; returns where the first begins."""
    if kind == STRING:
        return cursor.skip_strings(count, key)
    if kind in NUMBERS:
        return cursor.skip(count * NUMBERS[kind].itemsize, key)
    if kind != ARRAY:
        raise ModelError(f"{cursor.path}: {key} has values of type {kind}, but a GGUF file knows types 0 to 12")
    if depth == MAX_NESTING:
        raise ModelError(f"{cursor.path}: {key} has arrays nested more than {MAX_NESTING} deep")
    start = cursor.offset
    if 12 * count > cursor.remaining:
        raise ModelError(f"{cursor.path} is truncated: {key} claims {count} arrays, {cursor.remaining} bytes are left")
    cursor.count_items(count, key)
    for _ in range(count):
        inner, length = cursor.u32(f"the type of an array in {key}"), cursor.u64(f"the length of an array in {key}")
        _skip_items(cursor, inner, length, key, depth + 1)
    return start
