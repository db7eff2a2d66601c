"""A call as Python writes it: `name(key=value, ...)`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import orjson

from tessera.app.tools.call import CALLED_NAME, MAX_CALLED_NAME, MAX_KEY, Call
from tessera.app.tools.grammar import (
    CallableFunction,
    GrammarWriter,
    definitions_of,
    literal,
    parameters_of,
    value_expression,
)
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parts import PartWriter, new_call_id
from tessera.app.tools.python_value import PythonValue

_LABEL: Final = re.compile(r"[^\s()=,'\"\[\]{}<>]*")


class PythonCall(Call):
    """Reads one call. It begins when the first argument has its `=` or the brackets are closed."""

    def __init__(
        self, writer: PartWriter, accepts: Callable[[str], bool], *, new_id: Callable[[], str] = new_call_id
    ) -> None:
        super().__init__(writer, new_id)
        self._accepts = accepts
        self._label = ""  # the name or key that is being read
        self._name = ""
        self._num_arguments = 0
        self._value: PythonValue | None = None
        self._read: Callable[[str, int], int] = self._read_name

    def read_call(self, text: str, start: int) -> int:
        position = start
        while position < len(text) and not self.ended:
            position = self._read(text, position)
        return position

    def _read_name(self, text: str, position: int) -> int:
        end = self._read_label(text, position, MAX_CALLED_NAME)
        if end < len(text) and not self.failed:
            if text[end] == "(" and CALLED_NAME.fullmatch(self._label) and self._accepts(self._label):
                self._name = self._label
                self._read = self._read_argument
                return end + 1
            self._fail()
        return end

    def _read_argument(self, text: str, position: int) -> int:
        """The beginning of an argument, or the closing bracket."""
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == ")":
            self._write_call(self._name, "}" if self._num_arguments else "{}")
            self.done = True
            return position + 1
        self._label = ""
        self._read = self._read_key
        return position

    def _read_key(self, text: str, position: int) -> int:
        end = self._read_label(text, position, MAX_KEY)
        if end < len(text) and not (self.failed or self.broken):
            self._read = self._read_equals
        return end

    def _read_equals(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text[position] != "=" or not self._label:
            self._fail()
            return position
        self._write_call(self._name, ", " if self._num_arguments else "{", orjson.dumps(self._label).decode() + ": ")
        self._num_arguments += 1
        self._value = PythonValue()
        self._read = self._read_value
        return position + 1

    def _read_value(self, text: str, position: int) -> int:
        assert self._value is not None
        end = self._value.scan_value(text, position)
        self._writer.write_arguments(self._value.take_json())
        if self._value.failed:
            self._fail()
        elif self._value.done:
            self._read = self._after_value
        return end

    def _after_value(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text[position] == ",":
            self._read = self._read_argument
            return position + 1
        if text[position] != ")":
            self._fail()
        else:
            self._read = self._read_argument
        return position

    def _read_label(self, text: str, position: int, limit: int) -> int:
        found = _LABEL.match(text, position, position + limit + 1 - len(self._label))
        assert found is not None
        self._label += found.group()
        if len(self._label) > limit:
            self._fail()
        return found.end()


def python_call_expression(writer: GrammarWriter, function: CallableFunction, part: str) -> str:
    """The Lark expression of a call: parameters in the schema's order, with JSON for values, which Python reads too."""
    definitions = definitions_of(function)
    alone, after = '""', '""'  # the parameters from one on, where none and where some have been written before it
    for index, (key, schema, is_required) in reversed(list(enumerate(parameters_of(function)))):
        value = writer.rule(f"{part}_{index}", value_expression(schema, definitions, strict=function.strict))
        argument = f"{literal(f'{key}=')} {value} {after}"
        options = (
            (f"{argument}", f'", " {argument}')
            if is_required
            else (f"{argument} | {alone}", f'", " {argument} | {after}')
        )
        alone = writer.rule(f"{part}_{index}_alone", options[0])
        after = writer.rule(f"{part}_{index}_after", options[1])
    return f'{literal(f"{function.name}(")} {alone} ")"'
