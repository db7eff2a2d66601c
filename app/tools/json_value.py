"""Finding the end of a JSON value in text that arrives in pieces, each character read once (RFC 8259).

Structure, literals and numbers are checked; escapes and control characters inside strings are not.
"""

from __future__ import annotations

import re
from typing import Final

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_WHOLE_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_CLOSERS = {"{": "}", "[": "]"}

# The characters that may come next, for each thing that may.
_VALUE = '{["-0123456789tfn'
_KEY = '"'
_KEY_OR_END = '"}'
_COLON = ":"


def skip_space(text: str, position: int) -> int:
    """The first position from `position` on that is not white space."""
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


class JsonValue:
    """One value. Leading white space belongs to it, trailing does not.

    Attributes:
        done: the value is whole.
        failed: what was read is not the beginning of any JSON value.
        settled: an object has got as far as its first colon, or its end.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self.settled = False
        self._expected = _VALUE
        self._closers: list[str] = []
        self._in_string = False
        self._is_key = False
        self._escaped = False
        self._scalar: list[str] | None = None

    def scan_value(self, text: str, start: int) -> int:
        """Read on from `start`; -> the first position that was not read."""
        position = start
        while position < len(text) and not self.done and not self.failed:
            if self._in_string:
                position = self._string(text, position)
            elif self._scalar is not None:
                position = self._literal(self._scalar, text, position)
            else:
                position = self._structure(text, position)
        return position

    def _string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        found = _PLAIN.match(text, position)
        assert found is not None
        end = found.end()
        if end == len(text):
            return end
        if text[end] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            if self._is_key:
                self._expected = _COLON
            else:
                self._end_value()
        return end + 1

    def _literal(self, pieces: list[str], text: str, position: int) -> int:
        found = _SCALAR.match(text, position)
        assert found is not None
        pieces.append(found.group())
        if found.end() < len(text):
            if _WHOLE_SCALAR.fullmatch("".join(pieces)):
                self._scalar = None
                self._end_value()
            else:
                self.failed = True
        return found.end()

    def _structure(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        character = text[position]
        if character not in self._expected:
            self.failed = True
            return position
        if character in "}]":
            self._closers.pop()
            self._end_value()
        elif character in "{[":
            self._closers.append(_CLOSERS[character])
            self._expected = _KEY_OR_END if character == "{" else _VALUE + "]"
        elif character == '"':
            self._in_string = True
            self._is_key = self._expected in (_KEY, _KEY_OR_END)
        elif character == ",":
            self._expected = _KEY if self._closers[-1] == "}" else _VALUE
        elif character == ":":
            self.settled = True
            self._expected = _VALUE
        else:
            self._scalar = []
            return position
        return position + 1

    def _end_value(self) -> None:
        if self._closers:
            self._expected = "," + self._closers[-1]
        else:
            self.done = self.settled = True
