"""JSON schemas in words: what a field accepts, as a cell of a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

LARGEST = {2**31 - 1, 2**32 - 1, 2**63, 2**63 - 1, 2**64 - 1}  # as a bound these say nothing to a reader


def ref_name(schema: Schema) -> str | None:
    ref = schema.get("$ref")
    return ref.rpartition("/")[2] if isinstance(ref, str) else None


def accepts(schema: Schema) -> str:
    """What a value of the schema may be; `null` is left out, since it always means omitted."""
    name = ref_name(schema)
    if name is not None:
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(accepts(each) for each in schema[key] if each.get("type") != "null"))
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_json(value)}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"{kind}{_range(schema)}"
    if kind == "string":
        return f"string{_length(schema, 'minLength', 'maxLength', 'characters')}"
    if kind == "array":
        items = accepts(schema["items"]) if schema.get("items") else "anything"
        return f"list{_length(schema, 'minItems', 'maxItems', '')} of {items}"
    if kind == "object":
        return f"object{_length(schema, 'minProperties', 'maxProperties', 'keys')}{_values(schema)}"
    return str(kind) if kind else "anything"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    start = f"above {_number(above)}" if above is not None else _number(low)
    if start is None and high is None:
        return ""
    if low is not None and (low <= -(2**31) or high in LARGEST) and low < -1:
        return f" of {64 if max(-low, high or 0) > 2**32 else 32} bits"
    if high is None or high in LARGEST:
        return f", {start} or more"
    return f", {start} to {_number(high)}" if start is not None else f", at most {_number(high)}"


def _length(schema: Schema, least: str, most: str, unit: str) -> str:
    low, high = schema.get(least) or 0, schema.get(most)
    unit = f" {unit}" if unit else ""
    if high is None:
        return f" of {low:,} or more{unit}" if low > 1 else ""
    if low:
        return f" of {low:,} to {high:,}{unit}" if low != high else f" of {low:,}{unit}"
    return f" of up to {high:,}{unit}"


def _values(schema: Schema) -> str:
    for values in schema.get("patternProperties", {}).values():
        return f", each value {accepts(values)}"
    values = schema.get("additionalProperties")
    return f", each value {accepts(values)}" if isinstance(values, dict) and values else ""


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def with_default(schema: Schema) -> str:
    """`accepts`, and the default where one is stated and says something."""
    value = schema.get("default")
    stated = "" if value is None or value in ([], {}, "") else f"; default `{json.dumps(value)}`"
    return f"{accepts(schema)}{stated}"


def meaning(schema: Schema) -> str:
    """The field's own description, or the only one among its alternatives."""
    described = [schema, *schema.get("anyOf", ())]
    return cell(next((each["description"] for each in described if each.get("description")), ""))


def cell(content: str) -> str:
    """Fits a table: one line, no bars."""
    return " ".join(content.split()).replace("|", "\\|")


def refs(schema: Any) -> Iterator[str]:
    """Names of all schemas that this one points to, in order."""
    if isinstance(schema, dict):
        name = ref_name(schema)
        if name is not None:
            yield name
        for key, value in schema.items():
            if key != "discriminator":
                yield from refs(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from refs(value)
