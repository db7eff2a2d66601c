"""Olmo 3: calls in Python's form, one a line, between `<function_calls>` and `</function_calls>`.

Source: the chat template of allenai/Olmo-3-7B-Instruct.
"""

from __future__ import annotations

from tessera.app.tools.call import Call
from tessera.app.tools.grammar import CallSyntax, GrammarWriter
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser
from tessera.app.tools.python_call import PythonCall, python_call_expression
from tessera.app.tools.tool_format import ToolFormat

BEGIN = "<function_calls>"
END = "</function_calls>"


class Olmo3Parser(CallParser):
    """The closing tag may be missing."""

    openers = (BEGIN,)
    markers = (BEGIN, END)
    end_marker = END

    def _new_call(self) -> Call:
        return PythonCall(self._writer, self._accepts, new_id=self._new_id)

    def _open(self, opener: str) -> None:
        super()._open(opener)
        self._state = self._start

    def _start(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._source.append(text[position:end])
        if end < len(text):
            self._state = self._in_call
        return end

    def _after(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        found, end = self._read_literal(text, position, (END,))
        if found is not None:
            self._state = self._content
        elif not self._held:
            self._open("")
        return end

    def _end(self, cut: bool) -> None:
        if self._state == self._start:
            self._give_up()
        super()._end(cut)


def _around(writer: GrammarWriter) -> tuple[str, str]:
    return f'{writer.marker(BEGIN)} "\\n"', f'"\\n" {writer.marker(END)}'


OLMO3 = ToolFormat(Olmo3Parser, CallSyntax(python_call_expression, _around, separator='"\\n"'))
