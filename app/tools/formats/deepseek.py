"""DeepSeek: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, each in markers of its own.

V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fence of Markdown, V3.1 writes
`name<｜tool▁sep｜>{...}`. Source: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528, DeepSeek-V3.1.
"""

from __future__ import annotations

import re

from tessera.app.tools.call import CALLED_NAME, MAX_CALLED_NAME
from tessera.app.tools.call_object import NamedCall
from tessera.app.tools.grammar import CallableFunction, CallSyntax, GrammarWriter, arguments_expression, literal
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser, ToolSchemas
from tessera.app.tools.tool_format import ToolFormat

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
BEGIN = "<｜tool▁call▁begin｜>"
END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"
MAX_HEAD = MAX_CALLED_NAME + 64  # characters between the beginning of a call and its arguments

_HEAD = re.compile(
    rf"\s*[a-z]*{SEPARATOR}\s*(?P<later>{CALLED_NAME.pattern})\s*(?:{FENCE}(?:json)?\s*)?"
    rf"|\s*(?P<first>{CALLED_NAME.pattern})\s*{SEPARATOR}\s*(?:{FENCE}(?:json)?\s*)?"
)


class DeepseekParser(CallParser):
    """Reads both versions; the markers around all calls may be missing."""

    openers = (CALLS_BEGIN, BEGIN)
    markers = (CALLS_BEGIN, CALLS_END, BEGIN, END, SEPARATOR)
    end_marker = END

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._head_pieces: list[str] = []
        self._head_length = 0

    def _open(self, opener: str) -> None:
        super()._open(opener)
        self._state = self._wrapper if opener == CALLS_BEGIN else self._head
        self._head_pieces = []
        self._head_length = 0

    def _wrapper(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._source.append(text[position:start])
        if start == len(text):
            return start
        found, end = self._read_literal(text, start, (BEGIN,))
        if found is not None:
            self._source.append(found)
            self._state = self._head
        elif not self._held:
            self._give_up()
        return end

    def _head(self, text: str, position: int) -> int:
        """The name and what stands around it."""
        latest = position + MAX_HEAD - self._head_length
        brace = text.find("{", position, latest + 1)
        end = min(latest, len(text)) if brace < 0 else brace
        self._head_length += end - position
        self._head_pieces.append(text[position:end])
        self._source.append(text[position:end])
        if brace < 0 and end == len(text):
            return end
        head = _HEAD.fullmatch("".join(self._head_pieces))
        if brace < 0 or head is None:
            self._give_up()
        else:
            self._call = NamedCall(self._writer, head["later"] or head["first"], self._new_id)
            self._state = self._in_call
        return end

    def _after(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        found, end = self._read_literal(text, position, (FENCE, END, BEGIN, CALLS_END))
        if found == BEGIN:
            self._open(found)
        elif not self._held and found not in (FENCE, END):
            self._state = self._content
        return end

    def _end(self, cut: bool) -> None:
        if self._state in (self._wrapper, self._head):
            self._give_up()
        super()._end(cut)


def _around(writer: GrammarWriter) -> tuple[str, str]:
    return writer.marker(CALLS_BEGIN), writer.marker(CALLS_END)


def _v3_call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    arguments = writer.rule(part, arguments_expression(function))
    head = f'{writer.marker(BEGIN)} "function" {writer.marker(SEPARATOR)}'
    fence = literal(f"{function.name}\n{FENCE}json\n")
    return f"{head} {fence} {arguments} {literal(chr(10) + FENCE)} {writer.marker(END)}"


def _v31_call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    arguments = writer.rule(part, arguments_expression(function))
    head = f"{writer.marker(BEGIN)} {literal(function.name)} {writer.marker(SEPARATOR)}"
    return f"{head} {arguments} {writer.marker(END)}"


DEEPSEEK_V3 = ToolFormat(DeepseekParser, CallSyntax(_v3_call, _around))
DEEPSEEK_V31 = ToolFormat(DeepseekParser, CallSyntax(_v31_call, _around, separator=""))
