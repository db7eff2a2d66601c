"""Custom tools, whose input is free text. Chat templates know functions, so the model sees one with a text `input`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tessera.app.schema.fields import Text
from tessera.app.schema.structured_output import GrammarText
from tessera.app.schema.tool_names import MAX_TOOL_DESCRIPTION, ToolName

INPUT = "input"


class TextInput(BaseModel):
    """Any text."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["text"]


class GrammarInput(BaseModel):
    """Text that matches a grammar, which is shown to the model and enforced. Lark may not refer to itself."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: GrammarText


def _flat(value: Any) -> Any:
    """The grammar at one level, as Responses has it; in Chat Completions it is an object of its own."""
    if type(value) is dict and type(value.get("grammar")) is dict:
        return {**value, **value["grammar"]}
    return value


InputFormat = Annotated[
    Annotated[TextInput | GrammarInput, Field(discriminator="type")],
    BeforeValidator(_flat),
]


class CustomTool(BaseModel):
    """A tool's name, what it is for, and the form of its input."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: ToolName
    description: str | None = Field(default=None, max_length=MAX_TOOL_DESCRIPTION)
    format: InputFormat | None = None

    def as_function(self) -> dict[str, Any]:
        """The function that the model is offered."""
        description, text = self.description or "", {"type": "string"}
        grammar = self.format if isinstance(self.format, GrammarInput) else None
        if grammar is not None:
            description = f"{description}\nThe input matches this grammar ({grammar.syntax}):\n{grammar.definition}"
            if grammar.syntax == "regex":
                text["pattern"] = f"^(?:{grammar.definition})$"
        return {
            "name": self.name,
            "description": description.strip(),
            "parameters": {
                "type": "object",
                "properties": {INPUT: text},
                "required": [INPUT],
                "additionalProperties": False,
            },
            "strict": grammar is not None,
        }


def arguments_of(text: Text) -> str:
    """The arguments of the function, as JSON text, for an input."""
    return orjson.dumps({INPUT: text}).decode()
