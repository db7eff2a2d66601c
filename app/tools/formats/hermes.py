"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many as are needed.

Source: the chat templates of NousResearch/Hermes-3 and Qwen/Qwen3-8B, which many other families follow.
"""

from __future__ import annotations

from tessera.app.tools.grammar import CallableFunction, CallSyntax, GrammarWriter, json_call
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser
from tessera.app.tools.tool_format import ToolFormat

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(CallParser):
    """The closing tag may be missing, and one pair of tags may hold several objects."""

    openers = (BEGIN,)
    markers = (BEGIN, END)
    end_marker = END

    def _after(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text.startswith("{", position):
            self._open("")
            return position
        _, end = self._read_literal(text, position, (END,))
        if not self._held:
            self._state = self._content
        return end


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    inner = json_call(writer, function, part)
    return f"{writer.marker(BEGIN)} line_end {inner} line_end {writer.marker(END)}"


HERMES = ToolFormat(HermesParser, CallSyntax(_call))
