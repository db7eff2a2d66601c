"""Expressions of texts, rewritten to match those texts as they stand in a JSON string.

A character that JSON escapes becomes its escape sequence, in the one spelling that json.dumps has.
"""

from __future__ import annotations

import json
import re

ESCAPED_CHARACTERS = (*map(chr, range(32)), '"', "\\")
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
_SET_OPERATION = re.compile(r"(?<!\\)(?:\[|&&|--|~~|\|\|)")


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
    return f"/{_quoted_set(f'[{_in_set(first)}-{_in_set(last)}]')}/"


def quoted_regex(pattern: str, flags: str) -> str:
    """A Lark expression of what `/pattern/flags` matches.

    Raises:
        UnsupportedGrammarError: it has sets of Unicode properties, operations on sets, or the flag x.
    """
    if "x" in flags:
        raise UnsupportedGrammarError("the flag x")
    dot = r"[\x00-\U0010ffff]" if "s" in flags else r"[^\n]"
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
    letter = escape[1]
    if letter in "dDwWsS":
        return _quoted_set(f"[{escape}]")
    if letter in "pP":
        raise UnsupportedGrammarError(escape)
    if letter in "xu" and len(escape) > 2:
        return _character(chr(int(escape[2:].strip("{}"), 16)))
    if letter in ESCAPES:
        return _character(ESCAPES[letter])
    return escape if letter.isalnum() else _character(letter)


def _character(character: str) -> str:
    """An expression of one character of the text."""
    escaped = json_escaped(character)
    expression = "".join(map(_in_regex, escaped))
    return expression if len(escaped) == 1 else f"(?-i:{expression})"


def _quoted_set(given: str) -> str:
    """The characters of a set: as they are, or as their escape sequences."""
    if _SET_OPERATION.search(given[1:-1]) is not None or r"\p" in given.lower():
        raise UnsupportedGrammarError(given[:40])
    try:
        pattern = re.compile(given)
    except re.error:
        raise UnsupportedGrammarError(given[:40]) from None
    members = [character for character in ESCAPED_CHARACTERS if pattern.fullmatch(character) is not None]
    plain = f"[{given}&&{PLAIN_SET}]".replace('"', r"\x22")
    if not members:
        return plain
    sequences = "|".join("".join(map(_in_regex, json_escaped(character))) for character in members)
    return f"(?:{plain}|(?-i:{sequences}))"


def _in_regex(character: str) -> str:
    if character in '"\\':
        return rf"\x{ord(character):02x}"
    return r"\/" if character == "/" else re.escape(character)


def _in_set(character: str) -> str:
    return rf"\x{ord(character):02x}" if ord(character) < 128 else character
