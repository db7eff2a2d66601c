"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or newer `[TOOL_CALLS]name[ARGS]{...}` for each."""

from __future__ import annotations

import re
import secrets

from tessera.app.tools.call_object import CALLED_NAME, MAX_CALLED_NAME, NamedCall
from tessera.app.tools.parser import JsonCallParser, ToolSchemas, skip_space

BEGIN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
ID_LENGTH = 9  # Mistral's templates refuse calls with ids of any other length
MAX_HEAD = MAX_CALLED_NAME + len(CALL_ID) + 64 + len(ARGUMENTS)  # characters between [TOOL_CALLS] and {

_HEAD = re.compile(
    rf"\s*({CALLED_NAME.pattern})\s*(?:{re.escape(CALL_ID)}[a-zA-Z0-9_-]+)?(?:{re.escape(ARGUMENTS)})?\s*"
)


class MistralParser(JsonCallParser):
    """The mark of the arguments may be missing, as may the list's brackets around a single object."""

    openers = (BEGIN,)
    markers = (BEGIN, CALL_ID, ARGUMENTS)
    end_marker = BEGIN

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._in_list = False
        self._head_length = 0

    def _new_id(self) -> str:
        return secrets.token_hex(ID_LENGTH)[:ID_LENGTH]

    def _open(self, opener: str) -> None:
        super()._open(opener)
        self._in_list = False
        self._head_length = 0
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
        self._state = self._in_call if text[end] == "{" else self._head
        return end

    def _head(self, text: str, position: int) -> int:
        """The name and what may stand between it and its arguments."""
        latest = position + MAX_HEAD - self._head_length
        brace = text.find("{", position, latest + 1)
        end = min(latest, len(text)) if brace < 0 else brace
        self._head_length += end - position
        self._source.append(text[position:end])
        if brace < 0 and end == len(text):
            return end
        head = _HEAD.fullmatch("".join(self._source[1:]))
        if brace < 0 or head is None:
            self._give_up()
        else:
            self._call = NamedCall(self._writer, head.group(1), self._new_id)
            self._state = self._in_call
        return end

    def _after(self, text: str, position: int) -> int:
        if not self._in_list:
            self._state = self._content
            return position
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == ",":
            super()._open(",")
            return position + 1
        self._state = self._content
        return position + (text[position] == "]")

    def _end(self, cut: bool) -> None:
        if self._state in (self._start, self._head):
            self._give_up()
        super()._end(cut)
