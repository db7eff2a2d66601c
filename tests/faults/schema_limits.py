"""The limits that an OpenAPI description promises, each with a value within and a value beyond it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

REF = "#/components/schemas/"
STEP = 2**-10  # beyond the limit of a number


@dataclass(frozen=True)
class Limit:
    """`within` reaches the limit, `beyond` is one step further; both are whole bodies. `path` is for the reader."""

    path: str
    within: Any
    beyond: Any


@dataclass
class SchemaLimits:
    """Walks the request schemas of a description; each named schema is gone into once."""

    schemas: dict[str, Any]
    seen: set[str] = field(default_factory=set)

    def of(self, schema: dict[str, Any]) -> Iterator[Limit]:
        """Every limit within `schema`, whose parts around it are as small as they may be."""
        if "$ref" in schema:
            if schema["$ref"] not in self.seen:
                self.seen.add(schema["$ref"])
                yield from self.of(self._resolved(schema))
            return
        for form in _forms(schema):
            yield from self.of(form)
        kind = schema.get("type")
        if "const" in schema or "enum" in schema:
            return
        if kind in ("integer", "number"):
            yield from self._of_number(schema)
        elif kind == "string":
            yield from _of_string(schema)
        elif kind == "array":
            yield from self._of_array(schema)
        elif kind == "object":
            yield from self._of_object(schema)

    def unbounded(self, schema: dict[str, Any], path: str) -> Iterator[str]:
        """The paths of what has no maximum."""
        if "$ref" in schema:
            name = schema["$ref"].removeprefix(REF)
            if name not in self.seen:
                self.seen.add(name)
                yield from self.unbounded(self.schemas[name], name)
            return
        for form in _forms(schema):
            yield from self.unbounded(form, path)
        for name, child in schema.get("properties", {}).items():
            yield from self.unbounded(child, f"{path}.{name}")
        for name in ("items", "additionalProperties"):
            if isinstance(schema.get(name), dict):
                yield from self.unbounded(schema[name], f"{path}.{name}")
        if "const" not in schema and "enum" not in schema and not _is_bounded(schema):
            yield path

    def sample(self, schema: dict[str, Any]) -> Any:
        """The smallest value that fits."""
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        if forms := _forms(schema):
            return self.sample(next(form for form in forms if form.get("type") != "null"))
        match schema.get("type"):
            case "integer" | "number":
                return min(1, schema["maximum"])
            case "string":
                return "0" * max(1, schema.get("minLength", 1))
            case "array":
                return [self.sample(schema["items"])] * schema.get("minItems", 0)
            case "object":
                return {name: self.sample(schema["properties"][name]) for name in _required(schema)}
            case "boolean":
                return False
            case "null":
                return None
            case kind:
                raise ValueError(f"no sample of the type {kind}")

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.schemas[schema["$ref"].removeprefix(REF)] if "$ref" in schema else schema
        return found

    def _of_number(self, schema: dict[str, Any]) -> Iterator[Limit]:
        step = 1 if schema["type"] == "integer" else STEP
        yield Limit(" maximum", schema["maximum"], schema["maximum"] + step)
        if "exclusiveMinimum" in schema:
            yield Limit(" minimum", schema["exclusiveMinimum"] + step, schema["exclusiveMinimum"])
        else:
            yield Limit(" minimum", schema["minimum"], schema["minimum"] - step)

    def _of_array(self, schema: dict[str, Any]) -> Iterator[Limit]:
        one, most = self.sample(schema["items"]), schema["maxItems"]
        yield Limit(" maxItems", [one] * most, [one] * (most + 1))
        for limit in self.of(schema["items"]):
            yield Limit(f"[]{limit.path}", [limit.within], [limit.beyond])

    def _of_object(self, schema: dict[str, Any]) -> Iterator[Limit]:
        around = self.sample(schema)
        if "maxProperties" in schema:
            one = self._sample_entry(schema)
            entries = [(str(index), one) for index in range(schema["maxProperties"] + 1)]
            yield Limit(" maxProperties", dict(entries[:-1]), dict(entries))
        for pattern, child in schema.get("patternProperties", {}).items():
            key = "0"
            assert re.search(pattern, key)
            yield Limit(" key", {key: self.sample(child)}, {"0" * 1000: self.sample(child)})
            for limit in self.of(child):
                yield Limit(f".*{limit.path}", {key: limit.within}, {key: limit.beyond})
        if "propertyNames" in schema:
            longest = "0" * schema["propertyNames"]["maxLength"]
            yield Limit(" key", {longest: self._sample_entry(schema)}, {longest + "0": self._sample_entry(schema)})
        if isinstance(schema.get("additionalProperties"), dict):
            for limit in self.of(schema["additionalProperties"]):
                yield Limit(f".*{limit.path}", {"0": limit.within}, {"0": limit.beyond})
        for name, child in schema.get("properties", {}).items():
            for limit in self.of(child):
                path = f".{name}{limit.path}"
                yield Limit(path, {**around, name: limit.within}, {**around, name: limit.beyond})

    def _sample_entry(self, schema: dict[str, Any]) -> Any:
        child = schema.get("additionalProperties", True)
        child = next(iter(schema.get("patternProperties", {}).values()), child)
        return self.sample(child) if isinstance(child, dict) else 0


def _forms(schema: dict[str, Any]) -> list[dict[str, Any]]:
    forms: list[dict[str, Any]] = schema.get("anyOf") or schema.get("oneOf") or []
    return [form for form in forms if form.keys() != {"required"}]


def _required(schema: dict[str, Any]) -> list[str]:
    """Of an object, with the first of what it may have in each other's place."""
    either = [form["required"] for form in schema.get("anyOf", ()) if form.keys() == {"required"}]
    return [*schema.get("required", ()), *(either[0] if either else ())]


def _is_bounded(schema: dict[str, Any]) -> bool:
    match schema.get("type"):
        case "integer" | "number":
            return "maximum" in schema and bool({"minimum", "exclusiveMinimum"} & schema.keys())
        case "string":
            return "maxLength" in schema or "pattern" in schema
        case "array":
            return "maxItems" in schema
        case "object":
            # Fields that no description lists are ignored: the size and the depth of the whole body bound them.
            return "properties" in schema or "maxProperties" in schema
        case "boolean" | "null":
            return True
        case _:
            return "$ref" in schema or bool(_forms(schema))


def _of_string(schema: dict[str, Any]) -> Iterator[Limit]:
    if "maxLength" in schema:
        yield Limit(" maxLength", "0" * schema["maxLength"], "0" * (schema["maxLength"] + 1))
    else:
        longest = max(length for length in range(1, 1000) if re.search(schema["pattern"], "0" * length))
        yield Limit(" pattern", "0" * longest, "0" * (longest + 1))
