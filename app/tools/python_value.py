"""A Python literal as JSON, while it arrives in pieces; each character is read once.

Strings, numbers, True, False, None (and JSON's spellings of them), lists, tuples and dicts whose keys are strings.
Source: the lexical analysis chapter of The Python Language Reference.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from tessera.app.tools.json_value import skip_space

MAX_SCALAR = 320  # characters of a number
_PLAIN: Final = {quote: re.compile(rf"[^\\{quote}]*") for quote in ("'", '"')}
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


class PythonValue:
    """One value. Leading white space belongs to it, trailing does not.

    Attributes:
        done: the value is whole.
        failed: what was read is not the beginning of any value.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._json: list[str] = []
        self._closers: list[str] = []
        self._wants_comma = False  # JSON's comma is written with the element that follows it
        self._expected = "value"  # or "element", "key", "colon" or "comma"
        self._quote = ""
        self._is_long = False  # between three quotes
        self._num_quotes = 0  # read in a row, at a string's beginning or end
        self._at_string_start = False
        self._escape: str | None = None
        self._scalar: list[str] | None = None
        self._scalar_length = 0

    def scan_value(self, text: str, start: int) -> int:
        """Read on from `start`; -> the first position that was not read."""
        position = start
        while position < len(text) and not self.done and not self.failed:
            if self._quote:
                position = self._string(text, position)
            elif self._scalar is not None:
                position = self._read_scalar(self._scalar, text, position)
            else:
                position = self._structure(text, position)
        return position

    def take_json(self) -> str:
        """The JSON text since the last call."""
        pieces, self._json = self._json, []
        return "".join(pieces)

    def _structure(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        character = text[position]
        if self._expected == "colon":
            self.failed = character != ":"
            self._json.append(": ")
            self._expected = "value"
        elif self._closers and character == self._closers[-1] and self._expected != "value":
            self._json.append("}" if character == "}" else "]")
            self._closers.pop()
            self._wants_comma = True
            self._end_value()
        elif self._expected == "comma":
            self.failed = character != ","
            self._expected = "key" if self._closers[-1] == "}" else "element"
        elif character in "'\"":
            self._begin_element('"')
            self._quote, self._num_quotes, self._at_string_start = character, 1, True
        elif self._expected == "key":
            self.failed = True
        elif character in _CLOSERS:
            self._begin_element("{" if character == "{" else "[")
            self._closers.append(_CLOSERS[character])
            self._wants_comma = False
            self._expected = "key" if character == "{" else "element"
        else:
            self._scalar, self._scalar_length = [], 0
            return position
        return position + (not self.failed)

    def _begin_element(self, json: str) -> None:
        if self._wants_comma and self._expected in ("element", "key"):
            self._json.append(", ")
        self._json.append(json)

    def _end_value(self) -> None:
        if not self._closers:
            self.done = True
            return
        self._expected = "comma"
        self._wants_comma = True

    def _end_string(self) -> None:
        self._json.append('"')
        self._quote, self._is_long = "", False
        if self._expected == "key":
            self._expected = "colon"
        else:
            self._end_value()

    def _read_scalar(self, pieces: list[str], text: str, position: int) -> int:
        found = _SCALAR.match(text, position)
        assert found is not None
        pieces.append(found.group())
        self._scalar_length += len(found.group())
        if self._scalar_length > MAX_SCALAR:
            self.failed = True
        elif found.end() < len(text):
            self._scalar = None
            json = _scalar_json("".join(pieces))
            if json is None:
                self.failed = True
            else:
                self._begin_element(json)
                self._end_value()
        return found.end()

    def _string(self, text: str, position: int) -> int:
        if self._escape is not None:
            return self._read_escape(self._escape, text[position], position)
        if self._num_quotes:
            return self._read_quotes(text, position)
        found = _PLAIN[self._quote].match(text, position)
        assert found is not None
        self._write(found.group())
        end = found.end()
        if end == len(text):
            return end
        if text[end] == "\\":
            self._escape = ""
        elif self._is_long:
            self._num_quotes = 1
        else:
            self._end_string()
        return end + 1

    def _read_quotes(self, text: str, position: int) -> int:
        """One more character after quotes that begin a string or may end one of three quotes."""
        is_quote = text[position] == self._quote
        self._num_quotes += is_quote
        if self._at_string_start:
            if is_quote and self._num_quotes == 3:
                self._is_long, self._at_string_start, self._num_quotes = True, False, 0
            elif not is_quote:
                is_empty = self._num_quotes == 2
                self._at_string_start, self._num_quotes = False, 0
                if is_empty:
                    self._end_string()
        elif self._num_quotes == 3:
            self._num_quotes = 0
            self._end_string()
        elif not is_quote:
            self._write(self._quote * self._num_quotes)
            self._num_quotes = 0
        return position + is_quote

    def _read_escape(self, escape: str, character: str, position: int) -> int:
        """One more character of an escape."""
        num_digits = _NUM_DIGITS.get(escape[:1])
        if num_digits is None:
            if character in _NUM_DIGITS:
                self._escape = character
            else:
                self._write(_ESCAPES.get(character, character if character in "\\'\"/" else f"\\{character}"))
                self._escape = None
            return position + 1
        if character not in "0123456789abcdefABCDEF":
            self._write(f"\\{escape}")  # no escape after all
            self._escape = None
            return position
        self._escape = escape = escape + character
        if len(escape) == 1 + num_digits:
            self._escape = None
            code = int(escape[1:], 16)
            if escape[0] == "u":  # as JSON has it: halves of pairs included
                self._json.append(f"\\{escape}")
            else:
                self._write(chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else f"\\{escape}")
        return position + 1

    def _write(self, text: str) -> None:
        self._json.append(orjson.dumps(text).decode()[1:-1])


def _scalar_json(text: str) -> str | None:
    """A number or constant as JSON; None where it is neither."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return orjson.dumps(number).decode() if number - number == 0 else None  # neither infinite nor NaN
