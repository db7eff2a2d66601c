"""Llama 4 and 3.2 in Python's form: `[name(key=value, ...), ...]`, alone or after `<|python_start|>`.

Source: the prompt formats of Llama 4 and Llama 3.2 in Meta's documentation, https://www.llama.com/docs.
"""

from __future__ import annotations

from tessera.app.tools.call import Call
from tessera.app.tools.grammar import CallSyntax
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser
from tessera.app.tools.python_call import PythonCall, python_call_expression
from tessera.app.tools.tool_format import ToolFormat

BEGIN = "<|python_start|>"
END = "<|python_end|>"


class Llama4Parser(CallParser):
    """A list is one of calls only at the beginning of the completion or after the marker, of offered names.

    Any other is content.
    """

    openers = (BEGIN,)
    markers = (BEGIN, END)
    end_marker = "]"
    closers = (END,)
    reads_bare_calls = True
    bare_opener = "["

    def _new_call(self) -> Call:
        return PythonCall(self._writer, self._accepts, new_id=self._new_id)

    def _accepts(self, name: str) -> bool:
        return name in self._tools

    def _open(self, opener: str) -> None:
        super()._open(opener)
        self._state = self._start

    def _start(self, text: str, position: int) -> int:
        """The list's bracket, which may be missing after the marker, or the space after a comma."""
        end = skip_space(text, position)
        self._source.append(text[position:end])
        if end == len(text):
            return end
        self._state = self._name
        if text[end] == "[" and self._source[0] != ",":
            self._source.append("[")
            return end + 1
        return end

    def _name(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._source.append(text[position:end])
        if end < len(text):
            self._state = self._in_call
        return end

    def _after(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == ",":
            self._open(",")
            return position + 1
        self._state = self._closer
        return position + (text[position] == "]")

    def _end(self, cut: bool) -> None:
        if self._state in (self._start, self._name):
            self._give_up()
        super()._end(cut)


LLAMA4 = ToolFormat(Llama4Parser, CallSyntax(python_call_expression, lambda writer: ('"["', '"]"'), separator='", "'))
