"""Functions as a TypeScript namespace, which is how gpt-oss is shown its tools.

Source: `json_schema_to_typescript` and `template_tools_section` in openai/harmony, src/encoding.rs; beyond it, local
references and anyOf are followed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 16
# Of one function, whose references can repeat each other.
MAX_SCHEMAS = 4096
MAX_CHARS = 2**20  # of names, descriptions and choices
_NAMES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def tool_namespace(functions: Sequence[Mapping[str, Any]]) -> str:
    """The namespace `functions`; each function is an object with name, description and parameters."""
    lines = ["## functions", "", "namespace functions {", ""]
    for function in functions:
        lines += _comment(function.get("description"), "")
        lines += [f"type {function['name']} = ({_parameters(function.get('parameters'))}) => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


def _parameters(schema: Any) -> str:
    if not isinstance(schema, Mapping) or not schema.get("properties"):
        return ""
    return f"_: {_TypeWriter(schema).type_of({**schema, 'type': 'object'}, '', 0)}"


class _TypeWriter:
    """Writes the types of one function's schema; what is too deep or too much of it is `any`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_schemas = self._num_chars = 0

    def type_of(self, schema: Any, indent: str, depth: int) -> str:
        self._num_schemas += 1
        is_too_much = depth > MAX_DEPTH or self._num_schemas > MAX_SCHEMAS or self._num_chars > MAX_CHARS
        if is_too_much or not isinstance(schema, Mapping):
            return "any"
        if isinstance(reference := schema.get("$ref"), str):
            return self.type_of(self._referred(reference), indent, depth + 1)
        for key in ("oneOf", "anyOf"):
            if isinstance(variants := schema.get(key), list) and variants:
                return _union(self.type_of(variant, indent, depth + 1) for variant in variants)
        if isinstance(choices := schema.get("enum"), list) and choices:
            return self._counted(_union(map(_json, choices)))
        if "const" in schema:
            return self._counted(_json(schema["const"]))
        kind = schema.get("type")
        if isinstance(kind, list):
            return _union(self.type_of({**schema, "type": each}, indent, depth + 1) for each in kind)
        if kind == "object":
            return self._object(schema, indent, depth)
        if kind == "array":
            if "items" not in schema:
                return "Array<any>"
            items = self.type_of(schema["items"], indent, depth + 1)
            return f"({items})[]" if " | " in items and not items.startswith("{") else f"{items}[]"
        return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"

    def _object(self, schema: Mapping[str, Any], indent: str, depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return "object"
        required = schema.get("required")
        lines = ["{"]
        for key, value in properties.items():
            given = value if isinstance(value, Mapping) else {}
            lines += map(self._counted, _comment(given.get("description"), indent))
            mark = "" if isinstance(required, list) and key in required else "?"
            kind = self.type_of(value, f"{indent}    ", depth + 1)
            if given.get("nullable") is True and "null" not in kind:
                kind += " | null"
            lines.append(f"{indent}{self._counted(key)}{mark}: {kind},{self._counted(_default(given))}")
        return "\n".join([*lines, f"{indent}}}"])

    def _counted(self, text: str) -> str:
        self._num_chars += len(text)
        return text

    def _referred(self, reference: str) -> Any:
        """The schema that a reference within the function's own schema names."""
        found: Any = self._root
        for name in reference.removeprefix("#/").split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return ""
    default = schema["default"]
    return f" // default: {default if 'enum' in schema and isinstance(default, str) else _json(default)}"


def _comment(text: Any, indent: str) -> list[str]:
    return [f"{indent}// {line}" for line in text.splitlines()] if isinstance(text, str) else []


def _union(types: Any) -> str:
    return " | ".join(dict.fromkeys(types))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
