"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`.

Values are bare text, and the function's schema says what they are: text is passed on as it comes, all
else is read as JSON once it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tessera.app.tools.call_object import CALLED_NAME, MAX_CALLED_NAME
from tessera.app.tools.parser import ToolParser, ToolSchemas, skip_space
from tessera.app.tools.parts import new_call_id

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
MAX_KEY = 256

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class QwenCoderParser(ToolParser):
    """The tags around a function may be missing, as this model sometimes leaves the first one away."""

    openers = (BEGIN, FUNCTION)
    markers = (BEGIN, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._source: list[str] = []
        self._label: list[str] = []  # of the name or key that is being read
        self._label_length = 0
        self._function = ""
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # what is not passed on before it is whole
        self._at_start = False
        self._line_end = False  # a line end that may prove to be layout

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
        end, name = self._read_label(text, position, MAX_CALLED_NAME)
        self._source.append(text[position:end])
        if name is None:
            return end
        if not CALLED_NAME.fullmatch(name):
            self._give_up()
            return end
        self._function = name
        self._num_parameters = 0
        self._writer.begin_call(name, new_call_id())
        self._state = self._body
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
        end, key = self._read_label(text, position, MAX_KEY)
        if key is None:
            return end
        properties = self._tools.get(self._function, {}).get("properties")
        self._types = types_of(properties.get(key) if isinstance(properties, Mapping) else None)
        self._writer.write_arguments("{" if self._num_parameters == 0 else ", ")
        self._writer.write_arguments(orjson.dumps(key).decode() + ": ")
        if self._is_text:
            self._writer.write_arguments('"')
        self._num_parameters += 1
        self._value = []
        self._at_start = True
        self._line_end = False
        self._state = self._parameter
        return end

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _parameter(self, text: str, position: int) -> int:
        found = text.find(PARAMETER_END, position)
        if found < 0:
            end = len(text) - self._hold_prefix(text, position, (PARAMETER_END,))
            self._add_value(text[position:end])
            return len(text)
        self._add_value(text[position:found])
        self._end_value()
        self._state = self._body
        return found + len(PARAMETER_END)

    def _add_value(self, text: str) -> None:
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
        if self._is_text:
            self._writer.write_arguments(orjson.dumps(text).decode()[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._writer.write_arguments('"' if self._is_text else as_json("".join(self._value), self._types))

    def _close(self) -> None:
        self._writer.write_arguments("}" if self._num_parameters else "{}")
        self._call_ended()

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

    def _begin_label(self, state: Any) -> None:
        self._label = []
        self._label_length = 0
        self._state = state

    def _read_label(self, text: str, position: int, limit: int) -> tuple[int, str | None]:
        """A name or key up to its `>`; None while it goes on. One that is too long ends at the limit."""
        latest = position + limit - self._label_length
        found = text.find(">", position, latest + 1)
        end = min(latest, len(text)) if found < 0 else found
        self._label.append(text[position:end])
        self._label_length += end - position
        if found >= 0:
            return end + 1, "".join(self._label)
        return end, "".join(self._label) + ">" if end < len(text) else None

    def _give_up(self) -> None:
        """Turn what looked like a call into content."""
        self._writer.write_content("".join(self._source))
        self._source = []
        self._state = self._content

    def _end(self, cut: bool) -> None:
        if self._state in (self._wrapper, self._name):
            self._give_up()
        if self._state == self._content:
            self._writer.write_content(self._held)
        elif self._state == self._parameter:
            self._add_value(self._held)
            if cut:
                self._writer.write_arguments("".join(self._value))
            else:
                self._end_value()
                self._close()
        elif self._state == self._body and not cut:
            self._close()


def types_of(schema: Any) -> frozenset[str]:
    """JSON types that a schema allows: text where there is none, all of them where it cannot be told."""
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    if "enum" in schema and isinstance(schema["enum"], list):
        return frozenset(_type_of(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(entry for entry in kind if isinstance(entry, str))
    for combination in ("anyOf", "oneOf"):
        if isinstance(schema.get(combination), list):
            return frozenset[str]().union(*map(types_of, schema[combination]))
    return frozenset({*_TYPES.values(), "null"})


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def as_json(text: str, types: frozenset[str]) -> str:
    """A value's JSON: what the text says where that is of an allowed type, else the text as a string."""
    stripped = text.strip()
    try:
        kind = _type_of(orjson.loads(stripped))
    except orjson.JSONDecodeError:
        kind = ""
    if kind in types or (kind == "integer" and "number" in types):
        return stripped
    lowered = stripped.lower()
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    if "null" in types and lowered in ("null", "none"):
        return "null"
    return orjson.dumps(text).decode()
