"""Large JSON, read piece by piece: orjson holds the interpreter's lock for as long as one call takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from tessera.engine.contract.errors import InvalidRequestError

MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 2**16  # objects and lists of one body
MAX_JSON_VALUES = 2**20 + 2**16
MAX_JSON_STRINGS = 2**18  # a dict of twice as many keys is enlarged in one go, for 30 ms
MAX_JSON_RUN = 2**19  # bytes without a comma that are no string's value: a key, a number or spaces
PIECE = 2**16  # bytes that are parsed at once, in about a millisecond
STRING_PART = 2**16
ENTRIES_RELEASED = 2**14  # at once

_SPACE = b" \t\n\r"
_BRACE, _COMMA = ord("{"), ord(",")
_BEGIN = {ord("["): b"[", _BRACE: b"{"}
_END = {ord("["): b"]", _BRACE: b"}"}
_OUTER = {ord("["): b"[", _BRACE: b'{"":'}
_QUOTE_KIND, _COMMA_KIND, _BEGIN_KIND, _END_KIND = 1, 2, 3, 4
_KINDS = np.zeros(256, np.uint8)
_KINDS[list(b'",[{]}')] = [_QUOTE_KIND, _COMMA_KIND, _BEGIN_KIND, _BEGIN_KIND, _END_KIND, _END_KIND]
_STEPS = np.array([0, 0, 0, 1, -1], np.int32)  # of the depth, by kind
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")

_Span = tuple[int, int]
_Opened = tuple[int, _Span]  # a bracket, and the key before it if it is in an object


class JsonError(ValueError):
    """A text is not JSON; says at which line and column."""

    def __init__(self, text: bytes, position: int) -> None:
        line_start = text.rfind(b"\n", 0, position) + 1
        self.line = text.count(b"\n", 0, position) + 1
        self.column = len(text[line_start:position].decode(errors="replace")) + 1
        super().__init__(f"line {self.line}, column {self.column}")


@dataclass
class _Piece:
    """A text that ends before a comma of any depth, a long string, or with the whole text.

    Attributes:
        closed: brackets that end what earlier pieces have begun.
        opened: what later pieces end.
        string: of the string behind it, the beginning and the ends of its parts, without its quotes.
        string_key: the string's key, if it is in an object.
        is_wrong: its brackets do not match.
    """

    begin: int
    end: int
    closed: list[int] = field(default_factory=list)
    opened: list[_Opened] = field(default_factory=list)
    string: list[int] = field(default_factory=list)
    string_key: _Span = (0, 0)
    is_wrong: bool = False

    @property
    def next_begin(self) -> int:
        return (self.string[-1] if self.string else self.end) + 1


def parse_in_pieces(text: bytes) -> Any:
    """Parse a text, which is not empty, as orjson does, but in pieces.

    Raises:
        JsonError: it is not JSON.
        InvalidRequestError: it is nested too deeply or has too many parts; nothing has been made of it.
    """
    return _Building(text).of(list(_Cutting(text).pieces()))


def release(value: Any) -> None:
    """Empty a large JSON list or object, some entries at a time: to free a million numbers at once takes 20 ms."""
    for each in value.values() if type(value) is dict else value:
        if each and type(each) in (list, dict):
            release(each)
    if type(value) is dict:
        value.clear()
    while value:
        del value[-ENTRIES_RELEASED:]


class _Cutting:
    """Cuts a text at commas outside of strings and at long strings, and counts what it has."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._open = bytearray()  # the brackets
        self._num_containers = self._num_commas = self._num_strings = 0

    def pieces(self) -> Iterator[_Piece]:
        begin, size, follows_string = 0, PIECE, False
        while True:
            piece = self._next(begin, begin + size, follows_string=follows_string)
            if piece is None:
                if size >= MAX_JSON_RUN:
                    raise _refused(f"has a key, number or space of more than {MAX_JSON_RUN} bytes")
                size *= 2
                continue
            yield piece
            if piece.is_wrong or not self._open:
                return
            begin, size, follows_string = piece.next_begin, PIECE, bool(piece.string)

    def _next(self, begin: int, end: int, *, follows_string: bool) -> _Piece | None:
        """The piece that ends at the last comma before `end` or the string there; None if there is neither."""
        window = _without_escapes(self._text[begin:end])
        kinds = _KINDS[np.frombuffer(window, np.uint8)]
        marks = np.flatnonzero(kinds)
        kinds = kinds[marks]
        marks += begin
        is_quote = kinds == _QUOTE_KIND
        num_quotes = np.cumsum(is_quote)
        outside = np.flatnonzero(~is_quote & (num_quotes & 1 == 0))
        steps = _STEPS[kinds[outside]]
        depths = len(self._open) + np.cumsum(steps)
        quotes = marks[is_quote]
        is_rest = end >= len(self._text)
        string = 0
        commas = np.flatnonzero(steps == 0)
        if is_whole := bool((out_of_all := depths <= 0).any()):
            num_kept = int(out_of_all.argmax()) + 1
        elif is_rest:
            num_kept = len(outside)
        elif commas.size:
            num_kept = int(commas[-1]) + 1
        elif quotes.size % 2 and not follows_string and self._is_value(begin, int(quotes[-1])):
            num_kept = len(outside)
            string = int(quotes[-1])
        else:
            return None
        outside, steps, depths = outside[:num_kept], steps[:num_kept], depths[:num_kept]
        if num_kept:
            self._count(int(depths.max()), steps, int(num_quotes[outside[-1]]) // 2)
        if string:
            piece = _Piece(begin, string, string=self._parts(string + 1), string_key=_key_before(string, quotes))
        elif is_whole:
            piece = _Piece(begin, int(marks[outside[-1]]) + 1, is_wrong=bool(steps[-1] == 0 or depths[-1] < 0))
        elif is_rest:
            piece = _Piece(begin, len(self._text), is_wrong=bool(begin or num_kept))
        else:
            piece = _Piece(begin, int(marks[outside[-1]]))
        if not piece.is_wrong:
            is_bracket = steps != 0
            self._note_partners(piece, marks[outside[is_bracket]], depths[is_bracket], quotes)
        return piece

    def _is_value(self, begin: int, string: int) -> bool:
        """Whether a string is no key."""
        before = self._text[begin:string].rstrip(_SPACE)[-1:]
        return before in (b":", b"[") or (not before and bool(self._open) and self._open[-1] != _BRACE)

    def _parts(self, begin: int) -> list[int]:
        """The beginning of a string and the ends of its parts, none of which is within a character."""
        bounds = [begin]
        while True:
            begin = bounds[-1]
            part = _without_escapes(self._text[begin : begin + STRING_PART])
            if part.endswith(b"\\"):
                part = part[:-1]  # what it escapes is not there
            quote = part.find(b'"')
            if quote >= 0:
                return [*bounds, begin + quote]
            if begin + STRING_PART >= len(self._text):
                raise JsonError(self._text, len(self._text))
            size = len(part)
            for _ in range(3):
                size -= self._text[begin + size] & 0xC0 == 0x80
            escape = part.rfind(b"\\", size - len(rb"\ud83d"), size)
            if escape >= 0:
                is_half = _HIGH_SURROGATE.match(part, escape - len(rb"\ud83d"))
                size = escape - (len(rb"\ud83d") if is_half else 0)
            bounds.append(begin + size)

    def _count(self, depth: int, steps: Any, num_strings: int) -> None:
        if depth > MAX_JSON_DEPTH:
            raise _refused(f"is nested more than {MAX_JSON_DEPTH} levels deep")
        self._num_containers += int(np.count_nonzero(steps > 0))
        self._num_commas += int(np.count_nonzero(steps == 0))
        self._num_strings += num_strings
        if self._num_containers > MAX_JSON_CONTAINERS:
            raise _refused(f"has more than {MAX_JSON_CONTAINERS} objects and lists")
        if self._num_commas >= MAX_JSON_VALUES:
            raise _refused(f"has more than {MAX_JSON_VALUES} values")
        if self._num_strings > MAX_JSON_STRINGS:
            raise _refused(f"has more than {MAX_JSON_STRINGS} strings")

    def _note_partners(self, piece: _Piece, brackets: Any, depths: Any, quotes: Any) -> None:
        """Note the brackets whose partners are in other pieces."""
        if not brackets.size:
            return
        before = np.concatenate(([len(self._open)], depths[:-1]))
        lowest_before = np.minimum.accumulate(before)
        lowest_after = np.minimum.accumulate(depths[::-1])[::-1]
        for position in brackets[depths < lowest_before].tolist():
            if _END[self._open.pop()][0] != self._text[position]:
                piece.end, piece.is_wrong = position + 1, True
                return
            piece.closed.append(position)
        for position in brackets[(depths > before) & (lowest_after >= depths)].tolist():
            piece.opened.append((position, _key_before(position, quotes)))
            self._open.append(self._text[position])


def _key_before(position: int, quotes: Any) -> _Span:
    """The string that ends before a value."""
    last = int(np.searchsorted(quotes, position)) - 1
    return (int(quotes[last - 1]), int(quotes[last]) + 1) if last > 0 else (0, 0)


def _without_escapes(text: bytes) -> bytes:
    """The same length without what quotes and backslashes are escaped by."""
    return text.replace(rb"\\", b"  ").replace(rb"\"", b"  ") if b"\\" in text else text


class _Building:
    """Makes of the pieces what orjson makes of the whole text."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._open: list[Any] = []  # the lists and dicts that are not complete
        self._brackets = bytearray()  # theirs

    def of(self, pieces: list[_Piece]) -> Any:
        first, *others = pieces
        value = _load(self._text, 0, first.end, b"", b"" if first.is_wrong else self._rest_of(first))
        if first.is_wrong:
            raise JsonError(self._text, first.end)
        if first.opened:
            self._enter(value, first.opened[0][0])
            self._enter_all(value, first, first.opened[1:])
        follows_string = bool(first.string)
        for piece in others:
            self._add(piece, follows_string=follows_string)
            follows_string = bool(piece.string)
        rest = self._text[pieces[-1].end :].lstrip(_SPACE)
        if rest:
            raise JsonError(self._text, len(self._text) - len(rest))
        return value

    def _add(self, piece: _Piece, *, follows_string: bool) -> None:
        if piece.is_wrong:
            outer = b"".join(_OUTER[bracket] for bracket in self._brackets[:-1])
            _load(self._text, piece.begin, piece.end, outer + _BEGIN[self._brackets[-1]], b"")
            raise JsonError(self._text, piece.end)
        begin, follows_value = piece.begin, follows_string
        for position in piece.closed:
            self._extend(_Piece(begin, position), follows_value=follows_value)
            self._open.pop()
            self._brackets.pop()
            begin, follows_value = position + 1, True
        if self._open:
            last = _Piece(begin, piece.end, opened=piece.opened, string=piece.string, string_key=piece.string_key)
            self._extend(last, follows_value=follows_value)

    def _extend(self, piece: _Piece, *, follows_value: bool) -> None:
        """Add what follows a comma, or a value that has ended, to the innermost list or dict."""
        begin, end = piece.begin, piece.end
        if follows_value:
            text = self._text[begin:end].lstrip(_SPACE)
            begin = end - len(text)
            if not text and not piece.string:
                return
            if text[:1] != b",":
                raise JsonError(self._text, begin)
            begin += 1
        if not piece.string:
            self._check_value(begin, end)
        container, bracket = self._open[-1], self._brackets[-1]
        value = _load(self._text, begin, end, _BEGIN[bracket], self._rest_of(piece) + _END[bracket])
        if bracket == _BRACE:
            container.update(value)
        else:
            container += value
        self._enter_all(value, piece, piece.opened)

    def _rest_of(self, piece: _Piece) -> bytes:
        ends = b"".join(_END[self._text[position]] for position, _ in reversed(piece.opened))
        return b'""' + ends if piece.string else ends

    def _enter_all(self, value: Any, piece: _Piece, opened: list[_Opened]) -> None:
        for position, key in opened:
            value = value[self._key(key)] if type(value) is dict else value[-1]
            self._enter(value, position)
        if piece.string:
            container = self._open[-1]
            at = self._key(piece.string_key) if type(container) is dict else -1
            container[at] = self._string(piece.string)
        elif piece.opened:
            self._check_value(piece.opened[-1][0] + 1, piece.end)

    def _enter(self, container: Any, position: int) -> None:
        self._open.append(container)
        self._brackets.append(self._text[position])

    def _key(self, span: _Span) -> Any:
        return _load(self._text, *span, b"", b"")

    def _string(self, bounds: list[int]) -> str:
        return "".join([_load(self._text, begin, end, b'"', b'"') for begin, end in pairwise(bounds)])

    def _check_value(self, begin: int, end: int) -> None:
        """There is something before a comma or a bracket, which the parser does not see."""
        if not self._text[begin:end].strip(_SPACE):
            raise JsonError(self._text, end)


def _load(text: bytes, begin: int, end: int, before: bytes, after: bytes) -> Any:
    """Parse a part of a text, with what is missing before and after it."""
    try:
        return orjson.loads(before + text[begin:end] + after)
    except orjson.JSONDecodeError as error:
        position = begin + len(error.doc[: error.pos].encode()) - len(before)
        raise JsonError(text, min(max(position, begin), end)) from None


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body {what}.", code="invalid_json")
