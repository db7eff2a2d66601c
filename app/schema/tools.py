"""The tools that a request offers, and which of them must, may or may not be called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    StrictBool,
    model_validator,
)

from tessera.app.schema.fields import JsonObject, wrong
from tessera.engine.contract.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_TOOL_NAME = 64
MAX_TOOL_DESCRIPTION = 65536

_TOOL_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME}}}")
_CHOICES = ("none", "auto", "required")


def _tool_name(name: str) -> str:
    if not _TOOL_NAME.fullmatch(name):
        raise wrong(f"must be 1 to {MAX_TOOL_NAME} letters, digits, _ or -")
    return name


ToolName = Annotated[str, AfterValidator(_tool_name), Field(json_schema_extra={"pattern": f"^{_TOOL_NAME.pattern}$"})]


class ToolFunction(BaseModel):
    """A function's name, what it is for, and the JSON schema of its parameters."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: ToolName
    description: str | None = Field(default=None, max_length=MAX_TOOL_DESCRIPTION)
    parameters: JsonObject | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["function"]
    function: ToolFunction
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_given(cls, value: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(value)
        if isinstance(value, dict):
            tool._given = value
        return tool

    def for_template(self) -> dict[str, Any]:
        """The tool as it was given, with its order and all its keys, because templates print it."""
        return self._given or self.model_dump(exclude_none=True)


class ToolChoice(BaseModel):
    """`mode` as in the API, or `function` with the one name that must be called."""

    model_config = ConfigDict(frozen=True)
    mode: Literal["none", "auto", "required", "function"]
    name: str | None = None

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "function")


def _tool_choice(value: Any) -> ToolChoice | None:
    if value is None or isinstance(value, ToolChoice):
        return value
    if value in _CHOICES:
        return ToolChoice(mode=value)
    function = value.get("function") if type(value) is dict and value.get("type") == "function" else None
    name = function.get("name") if type(function) is dict else None
    if type(name) is not str or not _TOOL_NAME.fullmatch(name):
        raise wrong('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
    return ToolChoice(mode="function", name=name)


class NamedToolChoice(BaseModel):
    """A `tool_choice` that names a function."""

    class Function(BaseModel):
        name: ToolName

    type: Literal["function"]
    function: Function


Tools = Annotated[
    list[Tool], Field(max_length=MAX_TOOLS, description=f"Functions that the model may call; at most {MAX_TOOLS}.")
]
ToolChoiceField = Annotated[
    ToolChoice | None,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedToolChoice | None),
    Field(description="Whether functions may, must or may not be called, or which one must be."),
]


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Raise InvalidRequestError for a choice that the offered tools do not allow."""
    if not choice.forced:
        return
    if not tools:
        raise InvalidRequestError("tool_choice is only allowed when tools are given.", param="tool_choice")
    if choice.name is not None and all(tool.function.name != choice.name for tool in tools):
        raise InvalidRequestError(
            f"tool_choice names the function {choice.name[:MAX_TOOL_NAME]!r}, which is not among the tools.",
            param="tool_choice",
        )
