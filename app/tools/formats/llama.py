"""Llama 3: `{"name": ..., "parameters": {...}}` alone or after `<|python_tag|>`; `;` between calls.

Source: the chat template of meta-llama/Llama-3.1-8B-Instruct.
"""

from __future__ import annotations

from tessera.app.tools.call_object import CallObject
from tessera.app.tools.grammar import CallableFunction, CallSyntax, GrammarWriter, json_call
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser
from tessera.app.tools.tool_format import ToolFormat

PYTHON_TAG = "<|python_tag|>"


class LlamaParser(CallParser):
    """A bare object is a call only at the beginning of the completion, with an offered name and with arguments.

    Any other is content that happens to be JSON.
    """

    openers = markers = (PYTHON_TAG,)
    end_marker = PYTHON_TAG
    reads_bare_calls = True
    bare_opener = "{"

    def _new_call(self) -> CallObject:
        return CallObject(self._writer, self._accepts, strict=True)

    def _accepts(self, name: str) -> bool:
        return name in self._tools

    def _after(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        if end == len(text):
            return end
        if text[end] == ";":
            self._state = self._between
            return end + 1
        self._state = self._content
        return end

    def _between(self, text: str, position: int) -> int:
        """After a semicolon, which belongs to the calls only if another one follows."""
        end = skip_space(text, position)
        if end == len(text):
            return end
        if text[end] == "{":
            self._open(";")
        else:
            self._writer.write_content(";")
            self._state = self._content
        return end

    def _end(self, cut: bool) -> None:
        if self._state == self._between:
            self._writer.write_content(";")
        super()._end(cut)


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    return json_call(writer, function, part, key="parameters")


LLAMA = ToolFormat(LlamaParser, CallSyntax(_call, separator='"; "'))
