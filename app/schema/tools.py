"""The tools that a request offers, and which of them must, may or may not be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from tessera.app.schema.custom_tools import CustomTool
from tessera.app.schema.fields import Entries, JsonObject, wrong
from tessera.app.schema.tool_names import MAX_TOOL_DESCRIPTION, MAX_TOOL_NAME, TOOL_NAME, ToolName
from tessera.engine.contract.errors import InvalidRequestError

MAX_TOOLS = 1024  # OpenAI takes 128; agents with several MCP servers send more

_CHOICES = ("none", "auto", "required")


class ToolFunction(BaseModel):
    """A function's name, what it is for, and the JSON schema of its parameters."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: ToolName
    description: str | None = Field(default=None, max_length=MAX_TOOL_DESCRIPTION)
    parameters: JsonObject | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A function that the model may call, or a custom tool, which is offered to it as a function.

    `function` is set by the server for a custom tool, and `given` for each: a private attribute, which pydantic sets in
    Python, took as long as all the rest.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["function", "custom"]
    function: ToolFunction
    custom: CustomTool | None = None
    given: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_given(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("type") == "custom":
            value = _with_function(value)
        given = value
        if value.get("custom") is not None:
            given = {"type": "function", "function": value.get("function")}
        return {**value, "given": given}

    def for_template(self) -> dict[str, Any]:
        """The tool as it was given, with its order and all its keys, because templates print it."""
        return self.given or self.model_dump(exclude_none=True)


def functions_as_tools(functions: Sequence[ToolFunction]) -> list[Tool]:
    """Of the older form."""
    return [
        Tool.model_validate({"type": "function", "function": function.model_dump(exclude_none=True)})
        for function in functions
    ]


def _with_function(tool: dict[str, Any]) -> dict[str, Any]:
    if type(tool.get("custom")) is not dict:
        raise wrong("is of type 'custom' and must have `custom`, an object with a name")
    try:
        function = CustomTool.model_validate(tool["custom"]).as_function()
    except ValidationError:  # which the field itself reports
        function = {"name": "custom"}
    return {**tool, "function": function}


class ToolChoice(BaseModel):
    """`mode` as in the API, or `function` with the one name that must be called; `allowed`: no others exist."""

    model_config = ConfigDict(frozen=True)
    mode: Literal["none", "auto", "required", "function"]
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "function")


def tool_name_in(value: Any, kind: str) -> str | None:
    """The name in `{"type": kind, kind: {"name": ...}}` or `{"type": kind, "name": ...}`; None for anything else."""
    if type(value) is not dict or value.get("type") != kind:
        return None
    inner = value.get(kind, value)
    name = inner.get("name") if type(inner) is dict else None
    return name if type(name) is str and TOOL_NAME.fullmatch(name) else None


def allowed_tools(value: Any) -> ToolChoice | None:
    """The choice in `{"mode": ..., "tools": [...]}`; None for anything else."""
    tools = value.get("tools") if type(value) is dict and value.get("mode") in ("auto", "required") else None
    if type(tools) is not list or not 0 < len(tools) <= MAX_TOOLS:
        return None
    names = [tool_name_in(tool, "function") or tool_name_in(tool, "custom") for tool in tools]
    found = tuple(name for name in names if name is not None)
    if len(found) < len(tools):
        return None
    return ToolChoice(mode=value["mode"], allowed=found)


def _tool_choice(value: Any) -> ToolChoice | None:
    if value is None or isinstance(value, ToolChoice):
        return value
    if type(value) is str and value in _CHOICES:
        return ToolChoice.model_validate({"mode": value})
    if type(value) is dict and value.get("type") == "allowed_tools":
        choice = allowed_tools(value.get("allowed_tools"))
    else:
        name = tool_name_in(value, "function") or tool_name_in(value, "custom")
        choice = ToolChoice(mode="function", name=name) if name is not None else None
    if choice is None:
        raise wrong(
            'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}}, the same of a custom'
            ' tool, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
        )
    return choice


class NamedTool(BaseModel):
    """The name of a tool."""

    name: ToolName


class NamedFunctionChoice(BaseModel):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedTool


class NamedCustomChoice(BaseModel):
    """A `tool_choice` that names a custom tool."""

    type: Literal["custom"]
    custom: NamedTool


class AllowedTools(BaseModel):
    """The tools of `allowed_tools`."""

    mode: Literal["auto", "required"]
    tools: Annotated[Entries[NamedFunctionChoice | NamedCustomChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(BaseModel):
    """A `tool_choice` that leaves some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[
    Entries[Tool], Field(max_length=MAX_TOOLS, description=f"The model may call them; at most {MAX_TOOLS}.")
]
ToolChoiceField = Annotated[
    ToolChoice | None,
    PlainValidator(
        _tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"]
        | NamedFunctionChoice
        | NamedCustomChoice
        | AllowedToolsChoice
        | None,
    ),
    Field(description="Whether tools may, must or may not be called, or which of them."),
]


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool], param: str = "tool_choice") -> None:
    """Raise InvalidRequestError for a choice that the offered tools do not allow."""
    if choice.forced and not tools:
        raise InvalidRequestError(
            f"{param} demands a call, but there are no tools: hosted ones do not count, as none are here.",
            param=param,
        )
    names = {tool.function.name for tool in tools}
    for name in (choice.name, *(choice.allowed or ())):
        if name is not None and name not in names:
            raise InvalidRequestError(
                f"{param} names the function {name[:MAX_TOOL_NAME]!r}, which is not among the tools.", param=param
            )
