"""JSON Schemas as far as grammars can enforce them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tessera.app.schema.request import log_once

# Keywords that llguidance refuses.
UNENFORCEABLE = frozenset(
    {
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
        *("not", "if", "then", "else", "$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
    }
)
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

_SCHEMAS_BY_NAME = frozenset({"properties", "$defs", "definitions"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems"})
_NOT_REGULAR = re.compile(r"\(\?[=!<]|\\[1-9]")  # look-around and back-references, which Rust's syntax lacks


def enforceable_schema(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """The schema without what grammars cannot enforce; the log says once for each keyword that it was left out.

    `oneOf` becomes `anyOf`. `param` is the request field that the schema comes from.

    Raises:
        RecursionError: it is nested hundreds of levels deep.
    """
    left_out: set[str] = set()
    found = _without_unenforceable(schema, left_out)
    for keyword in sorted(left_out):
        log_once(f"schema {keyword}", "%s: grammars cannot enforce %s, which is left out of schemas", param, keyword)
    return found


def _without_unenforceable(schema: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if _is_unenforceable(key, value, schema):
            left_out.add(key)
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[key] = {name: _walk(each, left_out) for name, each in value.items()}
        elif key == "patternProperties" and isinstance(value, dict):
            usable = {name: each for name, each in value.items() if not _NOT_REGULAR.search(name)}
            if len(usable) < len(value):
                left_out.add(key)
            kept[key] = {name: _walk(each, left_out) for name, each in usable.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            kept[key] = [_walk(each, left_out) for each in value]
        elif key == "oneOf" and isinstance(value, list) and "anyOf" not in schema:
            kept["anyOf"] = [_walk(each, left_out) for each in value]
        elif key in _SCHEMAS:
            kept[key] = _walk(value, left_out)
        else:
            kept[key] = value
    return kept


def _walk(schema: Any, left_out: set[str]) -> Any:
    return _without_unenforceable(schema, left_out) if isinstance(schema, dict) else schema


def _is_unenforceable(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key == "pattern":
        return isinstance(value, str) and _NOT_REGULAR.search(value) is not None
    if key in ("minProperties", "maxProperties"):
        properties, required = schema.get("properties"), schema.get("required")
        names = set(properties) if isinstance(properties, dict) else set()
        return not names <= (set(map(str, required)) if isinstance(required, list) else set())
    return key in UNENFORCEABLE
