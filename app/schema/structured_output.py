"""Structured output, OpenAI's `response_format` and vLLM's `structured_outputs`, and the engine's grammars for it."""

from __future__ import annotations

import re
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from tessera.app.schema.fields import Entries, JsonObject, wrong
from tessera.app.schema.json_schema import enforceable_schema
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import MAX_GRAMMAR_LENGTH, Grammar

MAX_SCHEMA_NAME = 64
MAX_DESCRIPTION = 65536
MAX_CHOICE_STRINGS = 1024

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # within a line, so that its time is linear
_SPECS = ("json", "json_object", "regex", "choice", "grammar")

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_LENGTH)]


def _not_empty(strings: list[str]) -> list[str]:
    if not all(strings):
        raise wrong("must not have empty strings")
    return strings


class JsonSchema(BaseModel):
    """A JSON schema and its name.

    It is enforced in any case. With `strict` a keyword that cannot be enforced is an error; otherwise it is left out.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: str = Field(min_length=1, max_length=MAX_SCHEMA_NAME)
    definition: JsonObject = Field(alias="schema", description="A JSON schema, nested at most 64 levels deep.")
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION)
    strict: StrictBool | None = None


class TextFormat(BaseModel):
    """Any text."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object, or one that matches `schema`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["json_object"]
    definition: JsonObject | None = Field(default=None, alias="schema")


class JsonSchemaFormat(BaseModel):
    """JSON that matches a schema."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["json_schema"]
    json_schema: JsonSchema


AnyFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat
ResponseFormat = Annotated[AnyFormat, Field(discriminator="type")]


Choices = Annotated[
    Entries[GrammarText], Field(min_length=1, max_length=MAX_CHOICE_STRINGS), AfterValidator(_not_empty)
]

# Older names of the fields of `structured_outputs`.
GuidedJson = Annotated[JsonObject | GrammarText | None, Field(description="As structured_outputs.json.")]
GuidedText = Annotated[GrammarText | None, Field(min_length=1, description="As in structured_outputs.")]
GuidedChoice = Annotated[Choices | None, Field(description="As structured_outputs.choice.")]


def _none_for_empty(value: Any) -> Any:
    return None if value == "" else value


# The names that llama.cpp's server and SGLang have for them, whose clients send empty texts for none.
OtherJson = Annotated[JsonObject | GrammarText | None, BeforeValidator(_none_for_empty)]
OtherText = Annotated[GrammarText | None, BeforeValidator(_none_for_empty)]


class StructuredOutputs(BaseModel):
    """Exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`; the rest only as it is by default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    json_: JsonObject | GrammarText | None = Field(
        default=None, alias="json", description="A JSON schema, as an object or as its text."
    )
    json_object: StrictBool | None = Field(default=None, description="true: any JSON object.")
    regex: GrammarText | None = Field(
        default=None, min_length=1, description="In Rust's syntax; matches the whole completion."
    )
    choice: Choices | None = Field(default=None, description="The completion is one of these.")
    grammar: GrammarText | None = Field(
        default=None, min_length=1, description="In llguidance's dialect of Lark, or in GBNF (`root ::= ...`)."
    )
    disable_fallback: StrictBool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    @model_validator(mode="before")
    @classmethod
    def _with_few_names(cls, value: Any) -> Any:
        """One name too many is as wrong as a thousand, of each of which pydantic would make an error."""
        most = len(cls.model_fields) + 1
        return dict(islice(value.items(), most)) if type(value) is dict and len(value) > most else value


def schema_grammar(schema: dict[str, Any], param: str, *, strict: bool = False) -> Grammar:
    """JSON that matches a schema; `param` is the request field that it comes from.

    Unless `strict`, keywords that grammars cannot enforce are left out.

    Raises:
        InvalidRequestError: it came as text and is nested hundreds of levels deep.
    """
    try:
        text = orjson.dumps(schema if strict else enforceable_schema(schema, param)).decode()
    except (orjson.JSONEncodeError, RecursionError):  # both go less deep than the parser
        raise InvalidRequestError(f"The schema of {param} is nested too deeply.", param=param) from None
    return Grammar("json_schema", text, param)


def response_format_grammar(response_format: AnyFormat, param: str = "response_format") -> Grammar | None:
    """The grammar of a `response_format`; None for text."""
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema
        return schema_grammar(schema.definition, param, strict=schema.strict is True)
    if isinstance(response_format, TextFormat):
        return None
    if response_format.definition is not None:
        return schema_grammar(response_format.definition, param)
    return Grammar("json_object", param=param)


def structured_outputs_grammar(spec: StructuredOutputs) -> Grammar:
    """The grammar of `structured_outputs`. Raises InvalidRequestError unless exactly one kind is given."""
    param = "structured_outputs"
    given: dict[str, Any] = {"json": spec.json_, "json_object": spec.json_object or None}
    given |= {"regex": spec.regex, "choice": spec.choice, "grammar": spec.grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InvalidRequestError(f"{param} must have exactly one of {', '.join(_SPECS)}.", param=param)
    return _grammar_of(names[0], given[names[0]], param, f"{param}.{names[0]}")


def other_grammar(kind: str, value: Any, name: str) -> Grammar:
    """The grammar of a field with another name than `structured_outputs`, such as `guided_json`."""
    return _grammar_of(kind, value, name, name)


def _grammar_of(kind: str, value: Any, param: str, path: str) -> Grammar:
    """`path` names the value itself, for errors."""
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
