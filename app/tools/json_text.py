"""Expressions of texts, rewritten to match those texts as they stand in a JSON string.

A character that JSON escapes becomes its escape sequence, in the one spelling that json.dumps has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ESCAPED_CHARACTERS = (*map(chr, range(32)), '"', "\\")
NUM_CODES = 27  # of the characters that JSON escapes by their code, not by a letter
ALL_CODES = "0[0-7bef]|1[0-9a-f]"
PLAIN_SET = r"[^\x22\x5c\x00-\x1f]"  # characters that stand for themselves
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}

_ATOM = re.compile(
    r"""(?P<group>\((?:\?(?:P?<\w+>|[a-zA-Z\-]*:|[a-zA-Z\-]+\)))?)
    |(?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])
    |(?P<escape>\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.))
    |(?P<operator>\{[0-9,\s]+\}|[)|*+?^$])
    |(?P<any>\.)
    |(?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_SET_CHARACTER = r"\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.)|[^\\]"
_SET_ITEM = re.compile(rf"({_SET_CHARACTER})(?:-({_SET_CHARACTER}))?", re.DOTALL)
_SET_OPERATION = re.compile("&&|--|~~")  # of sets with sets
_WHITE = "\t\n\v\f\r"
# Classes of characters, each with those of its members that JSON escapes.
SET_CLASSES = {
    r"\d": "",
    r"\w": "",
    r"\s": _WHITE,
    r"\D": "".join(ESCAPED_CHARACTERS),
    r"\W": "".join(ESCAPED_CHARACTERS),
    r"\S": "".join(character for character in ESCAPED_CHARACTERS if character not in _WHITE),
}


class UnsupportedGrammarError(ValueError):
    """The part of a grammar that cannot be rewritten."""


def json_escaped(text: str) -> str:
    """A text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted_literal(text: str, *, ignores_case: bool = False) -> str:
    """A Lark literal of `text` as it stands in a JSON string."""
    if not ignores_case:
        return json.dumps(json_escaped(text))
    # Escape sequences have a case, whatever the letters beside them have.
    pieces = [piece for piece in re.split(r"([\x00-\x1f\"\\])", text) if piece]
    quoted = [json.dumps(json_escaped(piece)) + ("" if piece in ESCAPED_CHARACTERS else "i") for piece in pieces]
    return f"({' '.join(quoted)})" if quoted else '""'


def quoted_range(first: str, last: str) -> str:
    """A Lark expression of one character from `first` to `last`."""
    return f"/{_quoted_set(f'[{_in_regex(first)}-{_in_regex(last)}]')}/"


def quoted_regex(pattern: str, flags: str) -> str:
    """A Lark expression of what `/pattern/flags` matches.

    Raises:
        UnsupportedGrammarError: it has sets of Unicode properties, operations on sets, or the flag x.
    """
    if "x" in flags:
        raise UnsupportedGrammarError("the flag x")
    dot = r"[\x00-\x{10ffff}]" if "s" in flags else r"[^\n]"
    return f"/{''.join(_quoted_atom(atom, dot) for atom in _ATOM.finditer(pattern))}/{flags.replace('s', '')}"


def _quoted_atom(atom: re.Match[str], dot: str) -> str:
    kind, given = atom.lastgroup, atom[0]
    if kind == "any":
        return _quoted_set(dot)
    if kind == "set":
        return _quoted_set(given)
    if kind == "escape":
        return _quoted_escape(given)
    if kind == "plain":
        return _character(given)
    if kind == "group" and re.match(r"\(\?[a-zA-Z\-]*[sx]", given) is not None:
        raise UnsupportedGrammarError(given)
    return given


def _quoted_escape(escape: str) -> str:
    if escape in SET_CLASSES:
        return _quoted_set(f"[{escape}]")
    return _character(_decoded_character(escape))


def _character(character: str) -> str:
    """An expression of one character of the text."""
    escaped = json_escaped(character)
    expression = "".join(map(_in_regex, escaped))
    return expression if len(escaped) == 1 else f"(?-i:{expression})"


@lru_cache(maxsize=1024)
def _quoted_set(given: str) -> str:
    """The characters of a set: as they are, or as their escape sequences."""
    if _SET_OPERATION.search(given) is not None:
        raise UnsupportedGrammarError(given[:40])
    negated = given.startswith("[^")
    items = [_set_item(*found.groups()) for found in _SET_ITEM.finditer(given[1 + negated : -1])]
    members = [each for each in ESCAPED_CHARACTERS if any(item.has(each) for item in items) != negated]
    plain = f"[[{'^' if negated else ''}{''.join(item.text for item in items)}]&&{PLAIN_SET}]"
    if not members:
        return plain
    return f"(?:{plain}|{_escape_sequences(members)})"


def _escape_sequences(members: Sequence[str]) -> str:
    """An expression of the escape sequences of these characters."""
    escapes = [json_escaped(character)[1:] for character in members]
    letters = "".join(_in_regex(escape) for escape in escapes if len(escape) == 1)
    codes = [escape[3:] for escape in escapes if len(escape) > 1]  # of u00XX
    coded = ALL_CODES if len(codes) == NUM_CODES else "|".join(codes)
    parts = ([f"[{letters}]"] if letters else []) + ([f"u00(?:{coded})"] if codes else [])
    return rf"(?-i:\x5c(?:{'|'.join(parts)}))"


@dataclass(frozen=True, slots=True)
class _SetItem:
    """A part of a set: a range of characters, or a class of them with `escaped`, those that JSON escapes."""

    text: str
    first: str = ""
    last: str = ""
    escaped: str = ""

    def has(self, character: str) -> bool:
        return self.first <= character <= self.last if self.first else character in self.escaped


def _set_item(first: str, last: str | None) -> _SetItem:
    if first in SET_CLASSES and last is None:
        return _SetItem(first, escaped=SET_CLASSES[first])
    begin, end = _decoded_character(first), _decoded_character(last or first)
    if begin > end:
        raise UnsupportedGrammarError(f"{first}-{last}")
    return _SetItem(f"{_in_regex(begin)}-{_in_regex(end)}" if last is not None else _in_regex(begin), begin, end)


def _decoded_character(written: str) -> str:
    """The character that a letter or an escape of an expression stands for."""
    if not written.startswith("\\"):
        if written == "[":  # of a nested set
            raise UnsupportedGrammarError("[[")
        return written
    letter = written[1]
    if letter in "xu" and len(written) > 2:
        return chr(int(written[2:].strip("{}"), 16))
    if letter in ESCAPES:
        return ESCAPES[letter]
    if letter.isalnum():
        raise UnsupportedGrammarError(written)
    return letter


def _in_regex(character: str) -> str:
    """Written as a number unless it is a letter, so that nothing takes it for a bracket or a quote."""
    if character.isalnum() or ord(character) > 127:
        return character
    return rf"\x{ord(character):02x}"
