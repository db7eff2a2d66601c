"""GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`.

Line ends may stand between the parts. Source: the chat templates of zai-org/GLM-4.5 and GLM-4.6.
"""

from __future__ import annotations

from tessera.app.tools.call import MAX_CALLED_NAME, MAX_KEY
from tessera.app.tools.grammar import (
    CallableFunction,
    CallSyntax,
    GrammarWriter,
    literal,
    parameters_of,
)
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import State
from tessera.app.tools.tagged_parser import TaggedParser
from tessera.app.tools.tool_format import ToolFormat
from tessera.app.tools.typed_arguments import typed_value_expression

BEGIN = "<tool_call>"
END = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
MAX_LABEL = MAX_CALLED_NAME + 16  # characters of a name and the white space around it


class Glm45Parser(TaggedParser):
    """The closing tag of a call may be missing."""

    openers = (BEGIN,)
    markers = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)

    value_end = VALUE_END

    @property
    def _unnamed_states(self) -> tuple[State, ...]:
        return (self._name,)

    @property
    def _closable_states(self) -> tuple[State, ...]:
        return self._body, self._key, self._before_value

    def _open(self, opener: str) -> None:
        self._source = [opener]
        self._begin_label(self._name)

    def _name(self, text: str, position: int) -> int:
        """The name, up to the first tag."""
        end, at_tag = self._read_label(text, position, "<", MAX_LABEL)
        self._source.append(text[position:end])
        if not at_tag and end == len(text):
            return end
        if not at_tag:
            self._give_up()
            return end
        literal, after = self._read_literal(text, end, (KEY, END))
        if self._held:
            return after
        if literal is None:
            self._give_up()
        else:
            self._begin_call("".join(self._label).strip())
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
        end, at_tag = self._read_label(text, position, "<", MAX_KEY)
        if not at_tag and end == len(text):
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


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    pieces = [writer.marker(BEGIN), literal(function.name), "line_end"]
    for index, (key, schema, is_required) in enumerate(parameters_of(function)):
        head = f"{writer.marker(KEY)} {literal(key)} {writer.marker(KEY_END)} line_end {writer.marker(VALUE)}"
        value = typed_value_expression(writer, function, schema, f"{part}_{index}", VALUE_END)
        argument = f"{head} {value} line_end"
        pieces.append(argument if is_required else f"({argument})?")
    return " ".join([*pieces, writer.marker(END)])


GLM45 = ToolFormat(Glm45Parser, CallSyntax(_call))
