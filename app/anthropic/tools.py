"""Tools of the Messages API, and which of them must, may or may not be used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag

from tessera.app.anthropic.client_tools import CLIENT_TOOLS, TOOLSET, ClientTool
from tessera.app.schema.fields import JsonObject, Off, wrong
from tessera.app.schema.request import log_once
from tessera.app.schema.tool_names import MAX_TOOL_DESCRIPTION, ToolName
from tessera.app.schema.tools import Tool, ToolChoice

# Tools that a service runs for the model, by the beginnings of their types: `web_search_20250305`.
_HOSTED_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")


def _is_hosted(tool: Any) -> bool:
    """Whether a service would run the tool; the log says so once for each type."""
    kind = tool.get("type") if type(tool) is dict else None
    if type(kind) is not str or not kind.startswith(_HOSTED_TOOLS):
        return False
    log_once(f"tool {kind}", "tools of the type %s are not shown to the model: nothing here runs them", kind[:80])
    return True


def own_tools(value: Any) -> Any:
    """The client's own tools. Those that a service would run are left out, because there is none here."""
    return [tool for tool in value if not _is_hosted(tool)] if type(value) is list else value


def _own_tool(value: Any) -> Any:
    return None if _is_hosted(value) else value


class MessageTool(BaseModel):
    """A function of the client's; `input_schema` is a JSON Schema of its input."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = Field(default=None, max_length=MAX_TOOL_DESCRIPTION)
    input_schema: JsonObject
    strict: StrictBool | None = None

    def for_chat(self) -> Tool:
        """The tool as Chat Completions has it."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.input_schema}
        strict = {"strict": self.strict} if self.strict is not None else {}
        return Tool.model_validate({"type": "function", "function": {**function, **strict}})


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if type(kind) is not str or not kind.startswith(CLIENT_TOOLS) or kind.startswith(TOOLSET):
        return "custom"
    return "client"


def _known(value: Any) -> Any:
    kind = value.get("type") if type(value) is dict else None
    if kind not in (None, "custom") and _tool_kind(value) != "client":
        shown = kind[:40] if type(kind) is str else "unknown"
        known = ", ".join(f"{name}*" for name in CLIENT_TOOLS)
        raise wrong(f"has the type '{shown}', but only the client's own tools are supported: custom, {known}")
    return value


AnyTool = Annotated[
    Annotated[Annotated[MessageTool, Tag("custom")] | Annotated[ClientTool, Tag("client")], Discriminator(_tool_kind)],
    BeforeValidator(_known),
]


OwnTool = Annotated[AnyTool | None, BeforeValidator(_own_tool)]  # None: one that a service would run


class MessageToolChoice(BaseModel):
    """`any`: one of the tools must be used; `tool`: the one called `name`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: Off = False

    def for_chat(self) -> ToolChoice:
        if self.type == "tool":
            return ToolChoice(mode="function", name=self.name)
        return ToolChoice(mode="required" if self.type == "any" else self.type)
