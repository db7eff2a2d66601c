"""Arguments written one by one as bare text: the function's schema says what they are.

Text is passed on as it comes; all else is read as JSON once it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tessera.app.tools.grammar import CallableFunction, GrammarWriter, input_terminal, literal, value_expression
from tessera.app.tools.parts import PartWriter

ANY_TYPE = frozenset({"string", "boolean", "integer", "number", "object", "array", "null"})
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


class TypedArguments:
    """Writes the arguments of one call as a JSON object."""

    def __init__(self, writer: PartWriter, parameters: Mapping[str, Any]) -> None:
        """`parameters`: the JSON schema of the function's parameters."""
        self._writer = writer
        self._parameters = parameters
        self._num_values = 0
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # what is not passed on before it is whole

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def begin_value(self, key: str, *, undeclared: frozenset[str] = frozenset({"string"})) -> None:
        """`undeclared`: types of a parameter that the schema does not have."""
        properties = self._parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._types = undeclared if schema is None else types_of(schema)
        self._writer.write_arguments("{" if self._num_values == 0 else ", ")
        self._writer.write_arguments(orjson.dumps(key).decode() + ": ")
        if self._is_text:
            self._writer.write_arguments('"')
        self._num_values += 1
        self._value = []

    def write_value(self, text: str) -> None:
        """The next piece of the value."""
        if self._is_text:
            self._writer.write_arguments(orjson.dumps(text).decode()[1:-1])
        else:
            self._value.append(text)

    def end_value(self) -> None:
        self._writer.write_arguments('"' if self._is_text else as_json("".join(self._value), self._types))

    def break_off(self) -> None:
        """Write what has come of a value that was cut."""
        self._writer.write_arguments("".join(self._value))

    def close(self) -> None:
        self._writer.write_arguments("}" if self._num_values else "{}")


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
    return ANY_TYPE


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


def typed_value_expression(
    writer: GrammarWriter, function: CallableFunction, schema: Any, part: str, end: str, *, line_end: str = ""
) -> str:
    """The Lark expression of a value and of the text that ends it: text as it is, everything else as JSON.

    Args:
        schema: of the value.
        line_end: expression of the layout around a value.
    """
    if function.input_grammar is not None:
        layout = r'"\n"' if line_end else ""
        text = f"{layout} {input_terminal(writer, function, part, quoted=False)} {layout}"
        return writer.ended(part, writer.rule(f"{part.upper()}_VALUE", text), end)
    if types_of(schema) == {"string"}:
        given = schema if isinstance(schema, Mapping) else {}
        choices = given.get("enum", [given["const"]] if "const" in given else None)
        if choices is None:
            return writer.until(part, end)
        value = f"({' | '.join(map(literal, choices))})"
    else:
        value = writer.rule(part, value_expression(writer, function, schema, part))
    return f"{line_end} {value} {line_end} {writer.marker(end)}"
