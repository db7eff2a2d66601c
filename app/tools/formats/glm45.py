"""GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`.

Line ends may stand between the parts. Source: the chat templates of zai-org/GLM-4.5 and GLM-4.6.
"""

from __future__ import annotations

from typing import Any

from tessera.app.tools.call_object import CALLED_NAME, MAX_CALLED_NAME
from tessera.app.tools.grammar import (
    CallableFunction,
    CallSyntax,
    GrammarWriter,
    literal,
    parameters_of,
)
from tessera.app.tools.parser import ToolParser, ToolSchemas, skip_space
from tessera.app.tools.parts import new_call_id
from tessera.app.tools.tool_format import ToolFormat
from tessera.app.tools.typed_arguments import TypedArguments, typed_value_expression

BEGIN = "<tool_call>"
END = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
MAX_KEY = 256
MAX_LABEL = MAX_CALLED_NAME + 16  # characters of a name and the white space around it


class Glm45Parser(ToolParser):
    """The closing tag of a call may be missing."""

    openers = (BEGIN,)
    markers = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._source: list[str] = []
        self._label: list[str] = []  # of the name or key that is being read
        self._label_length = 0
        self._arguments = TypedArguments(self._writer, {})

    def _open(self, opener: str) -> None:
        self._source = [opener]
        self._begin_label(self._name)

    def _begin_label(self, state: Any) -> None:
        self._label = []
        self._label_length = 0
        self._state = state

    def _name(self, text: str, position: int) -> int:
        """The name, up to the first tag."""
        latest = position + MAX_LABEL - self._label_length
        found = text.find("<", position, latest + 1)
        end = min(latest, len(text)) if found < 0 else found
        self._add_label(text[position:end])
        self._source.append(text[position:end])
        if found < 0 and end == len(text):
            return end
        if found < 0:
            self._give_up()
            return end
        literal, after = self._read_literal(text, end, (KEY, END))
        if self._held:
            return after
        name = "".join(self._label).strip()
        if literal is None or not CALLED_NAME.fullmatch(name):
            self._give_up()
            return end
        self._arguments = TypedArguments(self._writer, self._tools.get(name, {}))
        self._writer.begin_call(name, new_call_id())
        self._state = self._body
        return end

    def _body(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        literal, end = self._read_literal(text, position, (KEY, END))
        if literal == KEY:
            self._begin_label(self._key)
        elif not self._held:
            self._close()
            self._state = self._content
        return end

    def _key(self, text: str, position: int) -> int:
        """A key up to its closing tag; one that is too long ends at the limit."""
        latest = position + MAX_KEY - self._label_length
        found = text.find("<", position, latest + 1)
        end = min(latest, len(text)) if found < 0 else found
        self._add_label(text[position:end])
        if found < 0 and end == len(text):
            return end
        literal, after = self._read_literal(text, end, (KEY_END,))
        if not self._held:
            self._state = self._before_value
        return after if literal is not None or self._held else end

    def _before_value(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        literal, end = self._read_literal(text, position, (VALUE,))
        if literal is not None:
            self._arguments.begin_value("".join(self._label))
            self._state = self._value
        elif not self._held:
            self._state = self._body
        return end

    def _value(self, text: str, position: int) -> int:
        found = text.find(VALUE_END, position)
        if found < 0:
            end = len(text) - self._hold_prefix(text, position, (VALUE_END,))
            self._arguments.write_value(text[position:end])
            return len(text)
        self._arguments.write_value(text[position:found])
        self._arguments.end_value()
        self._state = self._body
        return found + len(VALUE_END)

    def _add_label(self, text: str) -> None:
        self._label.append(text)
        self._label_length += len(text)

    def _close(self) -> None:
        self._arguments.close()
        self._call_ended()

    def _give_up(self) -> None:
        """Turn what looked like a call into content."""
        self._writer.write_content("".join(self._source))
        self._source = []
        self._state = self._content

    def _end(self, cut: bool) -> None:
        if self._state == self._name:
            self._give_up()
        if self._state == self._content:
            self._writer.write_content(self._held)
        elif self._state == self._value:
            self._arguments.write_value(self._held)
            if cut:
                self._arguments.break_off()
            else:
                self._arguments.end_value()
                self._close()
        elif not cut:
            self._close()


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    pieces = [writer.marker(BEGIN), literal(function.name), "line_end"]
    for index, (key, schema, is_required) in enumerate(parameters_of(function)):
        head = f"{writer.marker(KEY)} {literal(key)} {writer.marker(KEY_END)} line_end {writer.marker(VALUE)}"
        value = typed_value_expression(writer, function, schema, f"{part}_{index}", VALUE_END)
        argument = f"{head} {value} line_end"
        pieces.append(argument if is_required else f"({argument})?")
    return " ".join([*pieces, writer.marker(END)])


GLM45 = ToolFormat(Glm45Parser, CallSyntax(_call))
