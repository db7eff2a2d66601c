"""What an answer has to look like: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from tessera.app.schema.fields import JsonObject, wrong
from tessera.engine.contract.sampling_params import MAX_GRAMMAR_LENGTH

MAX_SCHEMA_NAME = 64
MAX_DESCRIPTION = 65536
MAX_CHOICE_STRINGS = 1024

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_LENGTH)]


def _not_empty(strings: list[str]) -> list[str]:
    if not all(strings):
        raise wrong("must not have empty strings")
    return strings


class JsonSchema(BaseModel):
    """A JSON schema and its name. `strict` is accepted: the schema is enforced in any case."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: str = Field(min_length=1, max_length=MAX_SCHEMA_NAME)
    definition: JsonObject = Field(alias="schema", description="A JSON schema, nested at most 64 levels deep.")
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION)
    strict: StrictBool | None = None


class PlainFormat(BaseModel):
    """Any text, or any JSON object."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["text", "json_object"]


class JsonSchemaFormat(BaseModel):
    """JSON that satisfies a schema."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")]


Choices = Annotated[list[GrammarText], Field(min_length=1, max_length=MAX_CHOICE_STRINGS), AfterValidator(_not_empty)]

# The older names of what `structured_outputs` says.
GuidedJson = Annotated[JsonObject | GrammarText | None, Field(description="As structured_outputs.json.")]
GuidedText = Annotated[GrammarText | None, Field(min_length=1, description="As in structured_outputs.")]
GuidedChoice = Annotated[Choices | None, Field(description="As structured_outputs.choice.")]


class StructuredOutputs(BaseModel):
    """Exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`; the rest only as it is by default."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    json_: JsonObject | GrammarText | None = Field(
        default=None, alias="json", description="A JSON schema, as an object or as its text."
    )
    json_object: StrictBool | None = Field(default=None, description="true: any JSON object.")
    regex: GrammarText | None = Field(
        default=None, min_length=1, description="In Rust's syntax; matches the whole answer."
    )
    choice: Choices | None = Field(default=None, description="The answer is one of these.")
    grammar: GrammarText | None = Field(
        default=None, min_length=1, description="In llguidance's dialect of Lark, or in GBNF (`root ::= ...`)."
    )
    disable_fallback: StrictBool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None
