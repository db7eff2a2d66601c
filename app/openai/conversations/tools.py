"""Tools of the Responses API, and the functions as which the model is offered them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from tessera.app.schema.custom_tools import CustomTool
from tessera.app.schema.fields import MAX_NAME, Entries, wrong
from tessera.app.schema.request import log_once
from tessera.app.schema.tool_names import MAX_TOOL_DESCRIPTION, MAX_TOOL_NAME, TOOL_NAME, ToolName
from tessera.app.schema.tools import MAX_TOOLS, Tool, ToolChoice, ToolFunction, allowed_tools
from tessera.engine.contract.errors import InvalidRequestError

SEPARATOR = "__"
# By their beginnings: names have dates and versions at the end.
HOSTED_TOOLS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell", "shell"),
    *("computer", "apply_patch", "tool_search", "programmatic_tool_calling"),
)
SECRETS = frozenset({"authorization", "headers"})  # of a hosted tool, for the servers that it would call


class FunctionTool(ToolFunction):
    """A function of the client's; `parameters` is a JSON Schema of its arguments."""

    type: Literal["function"]


class CustomResponseTool(CustomTool):
    """A tool of the client's whose input is text."""

    type: Literal["custom"]


ClientTool = Annotated[FunctionTool | CustomResponseTool, Field(discriminator="type")]


class NamespaceTool(BaseModel):
    """Tools whose calls carry the namespace; the model knows each as NAMESPACE__NAME."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["namespace"]
    name: ToolName
    description: str | None = Field(default=None, max_length=MAX_TOOL_DESCRIPTION)
    tools: Entries[ClientTool] = Field(max_length=MAX_TOOLS)


class HostedTool(BaseModel):
    """A tool that OpenAI's servers run: taken, and not offered to the model. Its secrets are not kept."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    type: Annotated[
        str,
        Field(max_length=MAX_NAME, description="Versions and dates may follow."),
        WithJsonSchema({"type": "string", "enum": list(HOSTED_TOOLS)}),
    ]

    @model_validator(mode="before")
    @classmethod
    def _without_secrets(cls, value: Any) -> Any:
        return {name: value[name] for name in value if name not in SECRETS} if type(value) is dict else value


def _kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "hosted" if type(kind) is str and kind.startswith(HOSTED_TOOLS) else kind


def _known(value: Any) -> Any:
    kind = value.get("type") if type(value) is dict else "function"
    if _kind(value) not in ("function", "custom", "namespace", "hosted") and type(value) is dict:
        shown = kind[:40] if type(kind) is str else "unknown"
        raise wrong(f"has the type '{shown}', but only function, custom, namespace and hosted tools are known")
    if kind == "function" and type(value) is dict and "name" not in value and type(value.get("function")) is dict:
        raise wrong("has name and parameters in `function`, as in chat completions: here they stand beside `type`")
    return value


ResponseTool = Annotated[
    Annotated[
        Annotated[FunctionTool, Tag("function")]
        | Annotated[CustomResponseTool, Tag("custom")]
        | Annotated[NamespaceTool, Tag("namespace")]
        | Annotated[HostedTool, Tag("hosted")],
        Discriminator(_kind),
    ],
    BeforeValidator(_known),
]
ResponseTools: TypeAlias = list[FunctionTool | CustomResponseTool | NamespaceTool | HostedTool]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool as the client calls it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions that the model is offered, and by their names the client's tools behind them."""

    functions: list[Tool]
    by_name: Mapping[str, CalledTool]


def offered_name(name: str, namespace: str | None) -> str:
    """The name by which the model knows a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(SEPARATOR) else f"{namespace}{SEPARATOR}{name}"


def offered_tools(tools: Iterable[BaseModel]) -> OfferedTools:
    """Hosted tools are left out; the log says so once for each type.

    Raises:
        InvalidRequestError: a namespace and a name are too long together.
    """
    functions: dict[str, Tool] = {}  # of several with one name the last
    by_name: dict[str, CalledTool] = {}
    for index, tool in enumerate(tools):
        if isinstance(tool, HostedTool):
            log_once(f"tool {tool.type}", "hosted tools of type %r are left out: there are none here", tool.type[:40])
            continue
        members = tool.tools if isinstance(tool, NamespaceTool) else [tool]
        namespace = tool.name if isinstance(tool, NamespaceTool) else None
        for member in members:
            assert isinstance(member, FunctionTool | CustomResponseTool)
            name = offered_name(member.name, namespace)
            if not TOOL_NAME.fullmatch(name):
                raise InvalidRequestError(
                    f"tools[{index}]: {name[:160]!r} has more than {MAX_TOOL_NAME} characters.", param=f"tools[{index}]"
                )
            functions[name] = _function(member, name)
            by_name[name] = CalledTool(member.name, namespace, isinstance(member, CustomResponseTool))
    return OfferedTools(list(functions.values()), by_name)


def _function(tool: FunctionTool | CustomResponseTool, name: str) -> Tool:
    if isinstance(tool, CustomResponseTool):
        spec = tool.model_dump(exclude={"type"}, exclude_none=True)
        return Tool.model_validate({"type": "custom", "custom": {**spec, "name": name}})
    spec = tool.model_dump(exclude={"type"}, exclude_none=True)
    return Tool.model_validate({"type": "function", "function": {**spec, "name": name}})


class NamedResponseTool(BaseModel):
    """A tool that must be called; `namespace` may name its namespace."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["function", "custom"]
    name: ToolName


class AllowedResponseTools(BaseModel):
    """Some of the tools; hosted ones may be among them and count for nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Entries[NamedResponseTool] = Field(min_length=1, max_length=MAX_TOOLS)


@dataclass(frozen=True, slots=True)
class ResponseToolChoice:
    """`given` as the request has it, and what it means."""

    given: str | dict[str, Any]
    choice: ToolChoice


def _tool_choice(value: Any) -> ResponseToolChoice | None:
    if value is None or isinstance(value, ResponseToolChoice):
        return value
    if type(value) is str and value in ("none", "auto", "required"):
        return ResponseToolChoice(value, ToolChoice.model_validate({"mode": value}))
    kind = _kind(value) if type(value) is dict else None
    choice = None
    if kind == "hosted":
        raise wrong(f"demands a tool of type '{value['type'][:40]}', but this server has no hosted tools")
    if kind == "allowed_tools" and type(value.get("tools")) is list:
        own = [_with_namespace(tool) for tool in value["tools"] if type(tool) is not dict or _kind(tool) != "hosted"]
        only_hosted = value["tools"] and not own and value.get("mode") == "auto"
        choice = ToolChoice(mode="none") if only_hosted else allowed_tools({**value, "tools": own})
    elif kind in ("function", "custom"):
        name = _with_namespace(value).get("name")
        if type(name) is str and TOOL_NAME.fullmatch(name):
            choice = ToolChoice(mode="function", name=name)
    if choice is None:
        raise wrong(
            'must be "none", "auto", "required", {"type": "function" or "custom", "name": ...} or'
            ' {"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
        )
    return ResponseToolChoice(value, choice)


def _with_namespace(tool: Any) -> Any:
    if type(tool) is not dict or type(tool.get("name")) is not str or type(tool.get("namespace")) is not str:
        return tool
    return {**tool, "name": offered_name(tool["name"], tool["namespace"])}


ToolChoiceField = Annotated[
    ResponseToolChoice | None,
    PlainValidator(
        _tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools | None,
    ),
]
