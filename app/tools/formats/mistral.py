"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or newer `[TOOL_CALLS]name[ARGS]{...}` for each.

Source: mistral-common, and the chat templates of mistralai/Mistral-7B-Instruct-v0.3 and Mistral-Small-3.2-24B.
"""

from __future__ import annotations

import re
import secrets

from tessera.app.tools.call import CALLED_NAME, MAX_CALLED_NAME
from tessera.app.tools.call_list import CallListParser
from tessera.app.tools.call_object import NamedCall
from tessera.app.tools.grammar import (
    CallableFunction,
    CallSyntax,
    GrammarWriter,
    arguments_expression,
    json_call,
    literal,
)
from tessera.app.tools.parser import ToolSchemas
from tessera.app.tools.tool_format import ToolFormat

BEGIN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
ID_LENGTH = 9  # Mistral's templates refuse calls with ids of any other length
MAX_HEAD = MAX_CALLED_NAME + len(CALL_ID) + 64 + len(ARGUMENTS)  # characters between [TOOL_CALLS] and {

_HEAD = re.compile(
    rf"\s*({CALLED_NAME.pattern})\s*(?:{re.escape(CALL_ID)}[a-zA-Z0-9_-]+)?(?:{re.escape(ARGUMENTS)})?\s*"
)


class MistralParser(CallListParser):
    """The mark of the arguments may be missing, as may the list's brackets around a single object."""

    openers = (BEGIN,)
    markers = (BEGIN, CALL_ID, ARGUMENTS)
    end_marker = BEGIN

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._head_length = 0

    def _new_id(self) -> str:
        return secrets.token_hex(ID_LENGTH)[:ID_LENGTH]

    def _begin_other(self) -> None:
        self._head_length = 0
        self._state = self._head

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

    def _end(self, cut: bool) -> None:
        if self._state == self._head:
            self._give_up()
        super()._end(cut)


def _marked_call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    arguments = writer.rule(part, arguments_expression(function))
    return f"{writer.marker(BEGIN)} {literal(function.name)} {writer.marker(ARGUMENTS)} {arguments}"


def _around(writer: GrammarWriter) -> tuple[str, str]:
    return f'{writer.marker(BEGIN)} space "["', '"]"'


MISTRAL = ToolFormat(MistralParser, CallSyntax(json_call, _around, separator='", "'))
MISTRAL_MARKED = ToolFormat(MistralParser, CallSyntax(_marked_call, separator=""))
