"""Parts of a completion: content, reasoning, and tool calls with their arguments."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias


@dataclass(slots=True, frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """Reasoning that precedes the content."""

    text: str


@dataclass(slots=True, frozen=True)
class CallStart:
    """The beginning of call number `index` of this completion; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallStart | CallArguments


CONTENT, REASONING = -1, -2
MAX_LAYOUT = 64  # characters of white space around a call that are held back; before them it is content


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class PartWriter:
    """Collects a completion's parts. White space around calls is layout, not content.

    Attributes:
        num_calls: calls begun so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pieces: list[CallStart | tuple[int, str]] = []  # CONTENT, REASONING or the call's index, and text
        self._space = ""  # layout, unless content follows

    def write_content(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._pieces.append((CONTENT, self._space + body))
            self._space = ""
        self._space += text[len(body) :]
        if len(self._space) > MAX_LAYOUT:
            self._pieces.append((CONTENT, self._space[:-MAX_LAYOUT]))
            self._space = self._space[-MAX_LAYOUT:]

    def write_reasoning(self, text: str) -> None:
        if text:
            self._pieces.append((REASONING, text))

    def begin_call(self, name: str, call_id: str) -> None:
        self._space = ""
        self._pieces.append(CallStart(self.num_calls, call_id, name))
        self.num_calls += 1

    def write_arguments(self, text: str) -> None:
        if text:
            self._pieces.append((self.num_calls - 1, text))

    def finish(self) -> None:
        """End the text."""
        if self.num_calls == 0 and self._space:
            self._pieces.append((CONTENT, self._space))
        self._space = ""

    def take_parts(self) -> list[Part]:
        """The parts since the last call, neighbours of one kind joined."""
        pieces, self._pieces = self._pieces, []
        return [_join(list(group)) for _, group in groupby(pieces, _kind)]


def _kind(piece: CallStart | tuple[int, str]) -> object:
    return piece if isinstance(piece, CallStart) else piece[0]


def _join(pieces: list[CallStart | tuple[int, str]]) -> Part:
    first = pieces[0]
    if isinstance(first, CallStart):
        return first
    text = "".join(piece[1] for piece in pieces if not isinstance(piece, CallStart))
    if first[0] == REASONING:
        return Reasoning(text)
    return Content(text) if first[0] == CONTENT else CallArguments(first[0], text)
