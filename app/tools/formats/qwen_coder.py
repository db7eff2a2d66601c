"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.
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
from tessera.app.tools.parser import State, ToolSchemas
from tessera.app.tools.tagged_parser import TaggedParser
from tessera.app.tools.tool_format import ToolFormat
from tessera.app.tools.typed_arguments import typed_value_expression

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"


class QwenCoderParser(TaggedParser):
    """The tags around a function may be missing, as this model sometimes leaves the first one away."""

    openers = (BEGIN, FUNCTION)
    markers = (BEGIN, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

    value_end = PARAMETER_END

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._at_start = False
        self._line_end = False  # a line end that may prove to be layout

    @property
    def _unnamed_states(self) -> tuple[State, ...]:
        return self._wrapper, self._name

    @property
    def _closable_states(self) -> tuple[State, ...]:
        return (self._body,)

    def _open(self, opener: str) -> None:
        self._source = [opener]
        if opener == FUNCTION:
            self._begin_label(self._name)
        else:
            self._state = self._wrapper

    def _wrapper(self, text: str, position: int) -> int:
        start = skip_space(text, position)
        self._source.append(text[position:start])
        if start == len(text):
            return start
        literal, end = self._read_literal(text, start, (FUNCTION,))
        if literal is not None:
            self._source.append(literal)
            self._begin_label(self._name)
        elif not self._held:
            self._give_up()
        return end

    def _name(self, text: str, position: int) -> int:
        end, name = self._read_tag(text, position, MAX_CALLED_NAME)
        self._source.append(text[position:end])
        if name is not None:
            self._begin_call(name)
        return end

    def _body(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        literal, end = self._read_literal(text, position, (PARAMETER, FUNCTION_END, END))
        if literal == PARAMETER:
            self._begin_label(self._key)
        elif not self._held:
            self._close()
            self._state = self._after if literal == FUNCTION_END else self._content
        return end

    def _key(self, text: str, position: int) -> int:
        end, key = self._read_tag(text, position, MAX_KEY)
        if key is None:
            return end
        self._arguments.begin_value(key)
        self._at_start = True
        self._line_end = False
        self._state = self._value
        return end

    def _write_value(self, text: str) -> None:
        """All of the value but one line end before and after it."""
        if not text:
            return
        if self._at_start:
            self._at_start = False
            text = text.removeprefix("\n")
        if self._line_end and text:
            text = "\n" + text
            self._line_end = False
        if text.endswith("\n"):
            self._line_end = True
            text = text[:-1]
        super()._write_value(text)

    def _after(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        literal, end = self._read_literal(text, position, (END, FUNCTION))
        if literal == FUNCTION:
            self._open(literal)
        elif not self._held:
            self._state = self._content
        return end

    def _read_tag(self, text: str, position: int, limit: int) -> tuple[int, str | None]:
        """A name or key up to its `>`; None while it goes on. One that is too long ends at the limit."""
        end, at_mark = self._read_label(text, position, ">", limit)
        if at_mark:
            return end + 1, "".join(self._label)
        return end, "".join(self._label) + ">" if end < len(text) else None


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    pieces = [writer.marker(BEGIN), "line_end", literal(f"{FUNCTION}{function.name}>"), "line_end"]
    for index, (key, schema, is_required) in enumerate(parameters_of(function)):
        body = typed_value_expression(writer, function, schema, f"{part}_{index}", PARAMETER_END, line_end="line_end")
        parameter = f"{literal(f'{PARAMETER}{key}>')} {body} line_end"
        pieces.append(parameter if is_required else f"({parameter})?")
    pieces += [literal(FUNCTION_END), "line_end", writer.marker(END)]
    return " ".join(pieces)


QWEN_CODER = ToolFormat(QwenCoderParser, CallSyntax(_call))
