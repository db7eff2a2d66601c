"""Models of conversations and their items, for /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, RootModel

from tessera.app.http.description import ApiObject
from tessera.app.openai.objects import TokenLogprob

ItemStatusName: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(ApiObject):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(ApiObject):
    type: Literal["reasoning_text"]
    text: str


class ListedInputText(ApiObject):
    type: Literal["input_text"]
    text: str


class ListedMessage(ApiObject):
    type: Literal["message"]
    id: str
    status: ItemStatusName
    role: Literal["user", "assistant", "system", "developer"]
    content: list[Annotated[ListedInputText | OutputText, Field(discriminator="type")]]


class ListedCall(ApiObject):
    type: Literal["function_call"]
    id: str
    status: ItemStatusName
    call_id: str
    name: str
    namespace: str = Field(default="", description="Only of tools in a namespace.")
    arguments: str


class ListedCustomCall(ApiObject):
    type: Literal["custom_tool_call"]
    id: str
    status: ItemStatusName
    call_id: str
    name: str
    namespace: str = Field(default="", description="Only of tools in a namespace.")
    input: str


class ListedShellCall(ApiObject):
    type: Literal["local_shell_call"]
    id: str
    status: ItemStatusName
    call_id: str
    action: dict[str, Any]


class ListedCallOutput(ApiObject):
    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    id: str
    status: ItemStatusName
    call_id: str = Field(default="", description="Left out where it came without one.")
    name: str = Field(default="", description="Left out where it came without one.")
    namespace: str = Field(default="", description="Left out where it came without one.")
    output: str


class ListedTools(ApiObject):
    type: Literal["additional_tools"]
    id: str
    status: ItemStatusName
    role: Literal["developer"]
    tools: list[dict[str, Any]]


class ListedConfigurationUpdate(ApiObject):
    type: Literal["configuration_update"]
    id: str
    status: ItemStatusName
    reasoning: dict[str, Any] = Field(default={}, description="Left out where it changes nothing.")
    text: dict[str, Any] = Field(default={}, description="Left out where it changes nothing.")


class ListedOther(ApiObject):
    """An item that is left out of the prompt."""

    type: str
    id: str
    status: ItemStatusName


class SummaryText(ApiObject):
    type: Literal["summary_text"]
    text: str


class ListedReasoning(ApiObject):
    type: Literal["reasoning"]
    id: str
    status: ItemStatusName
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str = Field(default="", description="Only where it came with one.")


ListedItem: TypeAlias = (
    ListedMessage
    | ListedCall
    | ListedCustomCall
    | ListedShellCall
    | ListedCallOutput
    | ListedReasoning
    | ListedTools
    | ListedConfigurationUpdate
    | ListedOther
)


class ConversationItem(RootModel[Any]):
    """One item."""

    model_config = ConfigDict(defer_build=True)
    root: ListedItem


class ItemList(ApiObject):
    object: Literal["list"]
    data: list[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationObject(ApiObject):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(ApiObject):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
