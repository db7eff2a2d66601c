"""The base of the tool parsers: text goes in piece by piece, parts come out; each character is read once."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tessera.app.tools.call import Call
from tessera.app.tools.call_object import CallObject
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parts import Part, PartWriter, new_call_id

ToolSchemas = Mapping[str, Mapping[str, Any]]  # parameters by the function's name

State = Callable[[str, int], int]


class ToolParser(ABC):
    """Reads one completion. The outcome does not depend on how the text was cut into pieces.

    A state is a method that reads on from a position and returns the first position it did not read;
    it may keep the text's end back in `_held` where that could be the beginning of a marker.

    Attributes:
        openers: texts that may begin a call.
        reads_bare_calls: calls need none of the openers.
        markers: all texts that the format is made of; those that are special tokens must reach the parser.
        complete: as many calls as asked for are whole; what follows is not read.
    """

    openers: ClassVar[tuple[str, ...]]
    reads_bare_calls: ClassVar[bool] = False
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        self.complete = False
        self._tools = tools
        self._max_calls = max_calls
        self._writer = PartWriter()
        self._state: State = self._content
        self._held = ""
        self._find_opener = re.compile("|".join(map(re.escape, self.openers)) or "(?!)").search

    @property
    def num_calls(self) -> int:
        return self._writer.num_calls

    @property
    def thinking(self) -> bool:
        """The text so far ends within reasoning, which few formats have among their calls."""
        return False

    def read_text(self, text: str) -> None:
        text = self._held + text
        self._held = ""
        position = 0
        while position < len(text) and not self.complete:
            position = self._state(text, position)

    def finish(self, *, cut: bool) -> None:
        """End the text; `cut` if the model was not done with it."""
        if not self.complete:
            self._end(cut)
        self._writer.finish()

    def take_parts(self) -> list[Part]:
        """The parts since the last call."""
        return self._writer.take_parts()

    @abstractmethod
    def _open(self, opener: str) -> None:
        """Enter the state that follows one of the openers."""

    @abstractmethod
    def _end(self, cut: bool) -> None:
        """Write the held text, and the beginning of what is no call, as content."""

    def _content(self, text: str, position: int) -> int:
        found = self._find_opener(text, position)
        if found is None:
            end = len(text) - self._hold_prefix(text, position, self.openers)
            self._writer.write_content(text[position:end])
            return len(text)
        self._writer.write_content(text[position : found.start()])
        self._open(found.group())
        return found.end()

    def _hold_prefix(self, text: str, position: int, literals: tuple[str, ...]) -> int:
        """Keep back the text's end if it may begin one of the literals; -> its length."""
        longest = min(max(map(len, literals), default=1) - 1, len(text) - position)
        for length in range(longest, 0, -1):
            ending = text[-length:]
            if any(literal.startswith(ending) for literal in literals):
                self._held = ending
                return length
        return 0

    def _read_literal(self, text: str, position: int, literals: tuple[str, ...]) -> tuple[str | None, int]:
        """One of the literals and its end. While one may still be coming, None with the text's end (which is held)."""
        for literal in literals:
            if text.startswith(literal, position):
                return literal, position + len(literal)
        rest = text[position : position + max(map(len, literals))]
        if any(len(rest) < len(literal) and literal.startswith(rest) for literal in literals):
            self._held = rest
            return None, len(text)
        return None, position

    def _call_ended(self) -> None:
        self.complete = self.num_calls == self._max_calls


class CallParser(ToolParser):
    """For formats whose calls are read by a `Call`, which finds their ends.

    Attributes:
        end_marker: where broken arguments end; they are given out up to there.
        closers: texts of which one may follow the last call.
        bare_opener: what a call without an opener begins with, at the beginning of the completion; empty where calls
            need openers.
    """

    end_marker: ClassVar[str]
    closers: ClassVar[tuple[str, ...]] = ()
    bare_opener: ClassVar[str] = ""

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._source: list[str] = []
        self._call: Call = self._new_call()
        if self.bare_opener:
            self._state = self._bare_start

    @abstractmethod
    def _after(self, text: str, position: int) -> int:
        """The state after a whole call."""

    def _bare_start(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._writer.write_content(text[position:end])
        if end == len(text):
            return end
        if text[end] == self.bare_opener:
            self._open("")
        else:
            self._state = self._content
        return end

    def _new_call(self) -> Call:
        return CallObject(self._writer, self._accepts, new_id=self._new_id)

    def _accepts(self, name: str) -> bool:
        """Calls of functions that were not offered are calls as well: the client can tell the model so."""
        return True

    def _new_id(self) -> str:
        return new_call_id()

    def _open(self, opener: str) -> None:
        self._source = [opener]
        self._call = self._new_call()
        self._state = self._in_call

    def _in_call(self, text: str, position: int) -> int:
        call = self._call
        end = call.read_call(text, position)
        if not call.begun:
            self._source.append(text[position:end])
        if call.failed:
            self._give_up()
        elif call.broken:
            self._state = self._in_broken_arguments
        elif call.done:
            self._state = self._after
            self._call_ended()
        return end

    def _in_broken_arguments(self, text: str, position: int) -> int:
        found = text.find(self.end_marker, position)
        if found < 0:
            end = len(text) - self._hold_prefix(text, position, (self.end_marker,))
            self._writer.write_arguments(text[position:end])
            return len(text)
        self._writer.write_arguments(text[position:found])
        self._state = self._after
        self._call_ended()
        return found

    def _closer(self, text: str, position: int) -> int:
        """The state that takes one of the closers, if one comes."""
        position = skip_space(text, position)
        if position == len(text):
            return position
        _, end = self._read_literal(text, position, self.closers)
        if not self._held:
            self._state = self._content
        return end

    def _give_up(self) -> None:
        """Turn what looked like a call into content."""
        self._writer.write_content("".join(self._source))
        self._source = []
        self._state = self._content

    def _end(self, cut: bool) -> None:
        if self._state == self._in_call and not self._call.begun:
            self._give_up()
        elif self._state == self._in_broken_arguments:
            self._writer.write_arguments(self._held)
        if self._state in (self._content, self._closer):
            self._writer.write_content(self._held)
