"""InternLM 2.5 and 3: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>` for each call.

Source: the chat format of InternLM's repository, and the chat template of internlm/internlm2_5-7b-chat.
"""

from __future__ import annotations

from tessera.app.tools.grammar import CallableFunction, CallSyntax, GrammarWriter, json_call
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser
from tessera.app.tools.tool_format import ToolFormat

BEGIN = "<|action_start|>"
PLUGIN = "<|plugin|>"
END = "<|action_end|>"


class InternlmParser(CallParser):
    """An action of the interpreter's, which is code, is content."""

    openers = (BEGIN,)
    markers = (BEGIN, PLUGIN, END)
    end_marker = END
    closers = (END,)

    def _open(self, opener: str) -> None:
        super()._open(opener)
        self._state = self._plugin

    def _plugin(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._source.append(text[position:start])
        if start == len(text):
            return start
        literal, end = self._read_literal(text, start, (PLUGIN,))
        if literal is not None:
            self._source.append(literal)
            self._state = self._in_call
        elif not self._held:
            self._give_up()
        return end

    def _after(self, text: str, position: int) -> int:
        return self._closer(text, position)

    def _end(self, cut: bool) -> None:
        if self._state == self._plugin:
            self._give_up()
        super()._end(cut)


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    inner = json_call(writer, function, part, key="parameters")
    return f"{writer.marker(BEGIN)} {writer.marker(PLUGIN)} line_end {inner} line_end {writer.marker(END)}"


INTERNLM = ToolFormat(InternlmParser, CallSyntax(_call))
