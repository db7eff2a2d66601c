"""From what a request says about its answer's form to the engine's grammars."""

from __future__ import annotations

import re
from typing import Any

import orjson

from tessera.app.schema.structured import JsonSchemaFormat, PlainFormat, StructuredOutputs
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import Grammar

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # within a line, so that its time is linear
_SPECS = ("json", "json_object", "regex", "choice", "grammar")


def schema_grammar(schema: dict[str, Any], param: str) -> Grammar:
    """JSON that satisfies a schema; `param` is the request field that it comes from.

    Raises: InvalidRequestError for one that came as text and is nested hundreds of levels deep.
    """
    try:
        text = orjson.dumps(schema).decode()
    except orjson.JSONEncodeError:  # it goes less deep than the parser
        raise InvalidRequestError(f"The schema of {param} is nested too deeply.", param=param) from None
    return Grammar("json_schema", text, param)


def format_grammar(form: PlainFormat | JsonSchemaFormat | None, param: str = "response_format") -> Grammar | None:
    """Of a `response_format`; None where any text will do."""
    if form is None or form.type == "text":
        return None
    if isinstance(form, JsonSchemaFormat):
        return schema_grammar(form.json_schema.definition, param)
    return Grammar("json_object", param=param)


def structured_outputs_grammar(spec: StructuredOutputs) -> Grammar:
    """Raises: InvalidRequestError unless it says exactly one thing."""
    param = "structured_outputs"
    given: dict[str, Any] = {"json": spec.json_, "json_object": spec.json_object or None}
    given |= {"regex": spec.regex, "choice": spec.choice, "grammar": spec.grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InvalidRequestError(f"{param} must have exactly one of {', '.join(_SPECS)}.", param=param)
    return _grammar_of(names[0], given[names[0]], param, f"{param}.{names[0]}")


def guided_grammar(name: str, value: Any) -> Grammar | None:
    """Of one of the older fields `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`."""
    return None if value is None else _grammar_of(name.removeprefix("guided_"), value, name, name)


def _grammar_of(kind: str, value: Any, param: str, path: str) -> Grammar:
    """`path` names the value itself, for what is wrong with it alone."""
    match kind:
        case "json":
            return schema_grammar(_schema_object(value, path), param)
        case "regex":
            return Grammar("regex", value, param)
        case "choice":
            return Grammar("choice", orjson.dumps(value).decode(), param)
        case "grammar":
            return Grammar("gbnf" if _GBNF_RULE.search(value) else "lark", value, param)
    return Grammar("json_object", param=param)


def _schema_object(given: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = orjson.loads(given)
    except orjson.JSONDecodeError:
        schema = None
    if type(schema) is not dict:
        raise InvalidRequestError(f"{param} must be a JSON schema: an object, or its text.", param=param)
    return schema
