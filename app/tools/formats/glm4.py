"""GLM-4: the name on a line of its own, then the arguments as JSON; nothing marks a call.

Source: the chat template of THUDM/GLM-4-9B-0414.
"""

from __future__ import annotations

from tessera.app.tools.call_object import NamedCall
from tessera.app.tools.grammar import CallableFunction, CallSyntax, GrammarWriter, arguments_expression, literal
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import CallParser, ToolSchemas
from tessera.app.tools.tool_format import ToolFormat

AGAIN = "<|assistant|>"  # between calls


class Glm4Parser(CallParser):
    """A line is a name only where it is one of those offered, at the beginning or after another call."""

    openers = ()
    markers = (AGAIN,)
    end_marker = AGAIN
    reads_bare_calls = True

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._longest = max(map(len, tools), default=0)
        self._label = ""
        self._state = self._start

    def _open(self, opener: str) -> None:
        super()._open(opener)
        self._label = ""
        self._state = self._name

    def _start(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._writer.write_content(text[position:end])
        if end < len(text):
            self._open("")
        return end

    def _name(self, text: str, position: int) -> int:
        """One of the names, up to the end of its line."""
        latest = position + self._longest + 1 - len(self._label)
        line_end = text.find("\n", position, latest)
        end = min(latest, len(text)) if line_end < 0 else line_end
        self._label += text[position:end]
        self._source.append(text[position:end])
        if line_end >= 0 and self._label in self._tools:
            self._source.append("\n")
            self._state = self._arguments
            return end + 1
        if line_end >= 0 or not any(name.startswith(self._label) for name in self._tools):
            self._give_up()
        return end

    def _arguments(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._source.append(text[position:end])
        if end == len(text):
            return end
        if text[end] == "{":
            self._call = NamedCall(self._writer, self._label, self._new_id)
            self._state = self._in_call
        else:
            self._give_up()
        return end

    def _after(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        if end == len(text):
            return end
        found, end = self._read_literal(text, end, (AGAIN,))
        if found is not None or not self._held:
            self._state = self._start
        return end

    def _end(self, cut: bool) -> None:
        if self._state in (self._name, self._arguments):
            self._give_up()
        elif self._state == self._after:
            self._writer.write_content(self._held)
        super()._end(cut)


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    head = literal(f"{function.name}\n")
    return f"{head} {writer.rule(part, arguments_expression(function))}"


GLM4 = ToolFormat(Glm4Parser, CallSyntax(_call, separator='"\\n"'))
