"""Settings of responses that an item of the input may change: the effort of reasoning, and the format of text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tessera.app.schema.chat import ReasoningEffort
from tessera.app.schema.structured_output import JsonObjectFormat, JsonSchema, TextFormat


class FlatSchemaFormat(JsonSchema):
    """JSON that matches `schema`, with the name and the schema at one level."""

    type: Literal["json_schema"]


class TextConfig(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    format: Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Without effect.")


class ReasoningConfig(BaseModel):
    """`effort` is given to the chat template; summaries are not made, as the reasoning itself is shown."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
