"""Calls written as a JSON list of objects after an opener; a single object may stand without its list."""

from __future__ import annotations

from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser, ToolSchemas


class CallListParser(CallParser):
    """The base of such formats; one of the `closers` may follow the list."""

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        self._in_list = False
        super().__init__(tools, max_calls=max_calls)

    def _open(self, opener: str) -> None:
        super()._open(opener)
        self._in_list = False
        self._state = self._start

    def _start(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._source.append(text[position:end])
        if end == len(text):
            return end
        if text[end] == "[":
            self._in_list = True
            self._source.append("[")
            self._state = self._in_call
            return end + 1
        if text[end] == "{":
            self._state = self._in_call
        else:
            self._begin_other()
        return end

    def _begin_other(self) -> None:
        """What follows the opener is neither a list nor an object."""
        self._give_up()

    def _after(self, text: str, position: int) -> int:
        if not self._in_list:
            self._state = self._closer if self.closers else self._content
            return position
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == ",":
            super()._open(",")
            return position + 1
        closes = text[position] == "]"
        self._state = self._closer if closes and self.closers else self._content
        return position + closes

    def _end(self, cut: bool) -> None:
        if self._state == self._start:
            self._give_up()
        super()._end(cut)
