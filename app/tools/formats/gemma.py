"""FunctionGemma: `<start_function_call>call:name{key:<escape>text<escape>,other:1.5}<end_function_call>`.

Text stands between two `<escape>`, also in lists and objects; keys have no quotes. A turn with calls ends with the
beginning of their results, `<start_function_response>`. Source: the chat template and the model card of
google/functiongemma-270m-it.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from tessera.app.tools.call import MAX_CALLED_NAME, MAX_KEY
from tessera.app.tools.grammar import (
    CallableFunction,
    CallSyntax,
    GrammarWriter,
    literal,
    parameters_of,
    value_expression,
)
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import State, ToolSchemas
from tessera.app.tools.tagged_parser import TaggedParser
from tessera.app.tools.tool_format import ToolFormat
from tessera.app.tools.typed_arguments import ANY_TYPE, typed_value_expression, types_of

BEGIN = "<start_function_call>"
END = "<end_function_call>"
ESCAPE = "<escape>"
RESPONSE = "<start_function_response>"
MAX_DEPTH = 64
CALL = "call:"
MAX_LABEL = MAX_CALLED_NAME + 16  # characters of a name and the white space around it

_MARK = re.compile(r'<escape>|["\[\]{},]')
_QUOTED = re.compile(r'["\\]')
_WORD = re.compile(r"[^,\[\]{}]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class GemmaParser(TaggedParser):
    """The closing tag of a call may be missing."""

    openers = (BEGIN, RESPONSE)
    markers = (BEGIN, END, ESCAPE, RESPONSE)
    value_end = ESCAPE

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._bare: list[str] = []  # of a value that does not begin as text
        self._depth = 0
        self._text_end = ""  # what ends the text within it that is being read

    @property
    def _unnamed_states(self) -> tuple[State, ...]:
        return self._start, self._name

    @property
    def _closable_states(self) -> tuple[State, ...]:
        return self._body, self._key, self._before_value

    def _open(self, opener: str) -> None:
        if opener == RESPONSE:  # results are not the model's to write
            self.complete = True
            return
        self._source = [opener]
        self._state = self._start

    def _start(self, text: str, position: int) -> int:
        found, end = self._read_literal(text, position, (CALL,))
        if found is not None:
            self._source.append(found)
            self._begin_label(self._name)
        elif not self._held:
            self._give_up()
        return end

    def _name(self, text: str, position: int) -> int:
        """The name, up to the brace."""
        end, at_brace = self._read_label(text, position, "{", MAX_LABEL)
        self._source.append(text[position:end])
        if at_brace:
            name = "".join(self._label).strip()
            self._begin_call(name)
            return end + (self._state == self._body)
        if end < len(text):
            self._give_up()
        return end

    def _body(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == "}":
            self._close()
            self._state = self._after
            return position + 1
        if text[position] == ",":
            return position + 1
        self._begin_label(self._key)
        return position

    def _key(self, text: str, position: int) -> int:
        """A key up to its colon; one that is too long ends at the limit."""
        end, at_colon = self._read_label(text, position, ":", MAX_KEY)
        if not at_colon and end == len(text):
            return end
        self._state = self._before_value
        return end + at_colon

    def _before_value(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        found, end = self._read_literal(text, position, (ESCAPE,))
        if found is not None:
            self._arguments.begin_value(self._label_text)
            self._state = self._value
        elif not self._held:
            self._bare, self._depth, self._text_end = [], 0, ""
            self._state = self._bare_value
        return end

    @property
    def _label_text(self) -> str:
        return "".join(self._label).strip().strip('"')

    def _bare_value(self, text: str, position: int) -> int:
        """A number, a word, a list or an object, up to the comma or brace that is none of its own."""
        if self._text_end:
            return self._inner_text(text, position)
        found = _MARK.search(text, position)
        if found is None:
            end = len(text) - self._hold_prefix(text, position, (ESCAPE,))
            self._bare.append(text[position:end])
            return len(text)
        mark = found.group()
        if self._depth == 0 and mark in ",}]":
            self._bare.append(text[position : found.start()])
            self._end_bare_value()
            return found.start() + (mark == "]")
        self._bare.append(text[position : found.end()])
        if mark in (ESCAPE, '"'):
            self._text_end = mark
        elif mark != ",":
            self._depth += 1 if mark in "[{" else -1
        return found.end()

    def _inner_text(self, text: str, position: int) -> int:
        if self._text_end == ESCAPE:
            start = text.find(ESCAPE, position)
            end = start + len(ESCAPE)
        else:
            found = _QUOTED.search(text, position)
            start, end = (-1, 0) if found is None else found.span()
            if found is not None and found.group() == "\\":
                if end == len(text):
                    self._bare.append(text[position:start])
                    self._held = "\\"
                else:
                    self._bare.append(text[position : end + 1])
                return end + (end < len(text))
        if start < 0:
            stop = len(text) - (self._hold_prefix(text, position, (ESCAPE,)) if self._text_end == ESCAPE else 0)
            self._bare.append(text[position:stop])
            return len(text)
        self._bare.append(text[position:end])
        self._text_end = ""
        return end

    def _end_bare_value(self) -> None:
        self._arguments.begin_value(self._label_text, undeclared=ANY_TYPE)
        self._arguments.write_value(json_of("".join(self._bare)))
        self._arguments.end_value()
        self._state = self._body

    def _after(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        _, end = self._read_literal(text, position, (END,))
        if not self._held:
            self._state = self._content
        return end

    def _end(self, cut: bool) -> None:
        if self._state == self._bare_value and not cut:
            self._bare.append(self._held)
            self._end_bare_value()
        elif self._state == self._after:
            self._writer.write_content(self._held)
        super()._end(cut)


def json_of(text: str) -> str:
    """The JSON of a value: of a list or object with texts between `<escape>`, or of what is JSON; else `text`."""
    stripped = text.strip()
    if not stripped.startswith(("[", "{")):
        return stripped
    try:
        value, end = _read(stripped, 0, 0)
    except (ValueError, IndexError):
        return stripped
    return orjson.dumps(value).decode() if end == len(stripped) else stripped


def _read(text: str, position: int, depth: int) -> tuple[Any, int]:
    """A value and the position after it and the white space around it. Raises: ValueError, IndexError."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    position = skip_space(text, position)
    if text.startswith(ESCAPE, position):
        start = position + len(ESCAPE)
        end = text.index(ESCAPE, start)
        return text[start:end], skip_space(text, end + len(ESCAPE))
    if text[position] == "[":
        return _read_list(text, position, depth)
    if text[position] == "{":
        return _read_object(text, position, depth)
    string = _STRING.match(text, position)
    if string is not None:
        return orjson.loads(string.group()), skip_space(text, string.end())
    word = _WORD.match(text, position)
    assert word is not None
    bare = word.group().strip()
    try:
        return orjson.loads(bare), word.end()
    except orjson.JSONDecodeError:
        return bare, word.end()


def _read_list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    position = skip_space(text, position + 1)
    while text[position] != "]":
        value, position = _read(text, position, depth + 1)
        found.append(value)
        position = _next(text, position, "]")
    return found, skip_space(text, position + 1)


def _read_object(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    position = skip_space(text, position + 1)
    while text[position] != "}":
        if text.startswith(ESCAPE, position):
            key, position = _read(text, position, depth + 1)
        else:
            colon = text.index(":", position)
            key, position = text[position:colon].strip().strip('"'), colon
        if text[position] != ":":
            raise ValueError("a key without a value")
        found[key], position = _read(text, position + 1, depth + 1)
        position = _next(text, position, "}")
    return found, skip_space(text, position + 1)


def _next(text: str, position: int, closer: str) -> int:
    """After a comma, or at the closer."""
    if text[position] == ",":
        return skip_space(text, position + 1)
    if text[position] != closer:
        raise ValueError("neither a comma nor the end")
    return position


def _call(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    """Parameters in the schema's order, with JSON for values that are not text."""
    alone, after = '""', '""'  # the parameters from one on, where none and where some have been written before it
    for index, (key, schema, is_required) in reversed(list(enumerate(parameters_of(function)))):
        name = f"{part}_{index}"
        if function.input_grammar is not None or types_of(schema) == {"string"}:
            value = f"{writer.marker(ESCAPE)} {typed_value_expression(writer, function, schema, name, ESCAPE)}"
        else:
            value = writer.rule(name, value_expression(writer, function, schema, name))
        argument = f"{literal(f'{key}:')} {value} {after}"
        options = (
            (argument, f'"," {argument}') if is_required else (f"{argument} | {alone}", f'"," {argument} | {after}')
        )
        alone = writer.rule(f"{name}_alone", options[0])
        after = writer.rule(f"{name}_after", options[1])
    return f'{writer.marker(BEGIN)} {literal(f"{CALL}{function.name}{{")} {alone} "}}" {writer.marker(END)}'


GEMMA = ToolFormat(GemmaParser, CallSyntax(_call, separator='""'))
