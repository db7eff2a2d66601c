"""Chats: messages as chat templates read them, and the fields that decide how the assistant goes on.

A request of any of the chat APIs is turned into a `ChatRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictBool, model_validator

from tessera.app.schema.custom_tools import arguments_of
from tessera.app.schema.fields import (
    MAX_INT32,
    MAX_NAME,
    Entries,
    JsonObject,
    Off,
    Text,
    TextContent,
    at_most,
    integer,
    text_of,
    wrong,
)
from tessera.app.schema.generation_fields import GenerationRequest
from tessera.app.schema.request import RequestModel
from tessera.app.schema.tools import Tool, ToolChoice, ToolChoiceField, Tools, check_tool_choice
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import MAX_LOGPROBS

MAX_MESSAGES = 16384
MAX_TOOL_CALLS = 128
MAX_DOCUMENTS = 1024
NO_BUDGET = -1  # of reasoning, as in vLLM
FUNCTION_CALL_ID = "function0"  # of calls without an id; 9 characters, as Mistral's templates want

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TEXT_KEYS = {"text": "text", "refusal": "refusal"}


def _content(value: Any) -> str | None:
    return None if value is None else text_of(value, TEXT_KEYS)


class ToolCallFunction(BaseModel):
    """`arguments` is JSON text, as the model wrote it."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: str = Field(max_length=MAX_NAME)
    arguments: Text = ""


class CustomCall(BaseModel):
    """The call of a custom tool with its input."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: str = Field(max_length=MAX_NAME)
    input: Text = ""


class ToolCall(BaseModel):
    """A call that the assistant made earlier in the conversation; `function` is set by the server for a custom tool."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    id: str = Field(default="", max_length=MAX_NAME)
    type: Literal["function", "custom"] = "function"
    function: ToolCallFunction
    custom: CustomCall | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_function(cls, value: Any) -> Any:
        """The call of a custom tool as that of the function which the model was offered."""
        if type(value) is not dict or value.get("type") != "custom":
            return value
        custom = value.get("custom")
        if type(custom) is not dict or type(custom.get("name")) is not str or type(custom.get("input")) is not str:
            raise wrong("is of type 'custom' and must have `custom`, an object with a name and an input")
        return {**value, "function": {"name": custom["name"], "arguments": arguments_of(custom["input"])}}

    def for_template(self) -> dict[str, Any]:
        """A dict with the arguments as an object, which templates print; text that is no JSON object stays text."""
        arguments: Any = self.function.arguments
        try:
            parsed = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(BaseModel):
    """One message of any role; `function` is the older name of `tool`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, PlainValidator(_content, json_schema_input_type=TextContent | None)] = None
    name: str | None = Field(default=None, max_length=MAX_NAME)
    tool_calls: Entries[ToolCall] | None = Field(default=None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = Field(default=None, max_length=MAX_NAME)
    refusal: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    audio: None = Field(default=None, description="Must be null: there is no audio here.")
    function_call: ToolCallFunction | None = Field(default=None, description="The older form of `tool_calls`.")

    def check(self, path: str, *, is_history: bool = False) -> None:
        """Raise InvalidRequestError for a message without what its role needs.

        Args:
            is_history: an assistant's message may be empty: completions that end within the reasoning have no content,
                and many clients send back no more than that.
        """
        called = self.tool_calls or self.function_call is not None
        has_other = is_history or called or self.refusal is not None or self.given_reasoning is not None
        if self.content is None and not (self.role == "assistant" and has_other):
            raise InvalidRequestError(f"{path}.content is required.", param=f"{path}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequestError(
                f"{path}.tool_call_id is required in a message of role 'tool'.", param=f"{path}.tool_call_id"
            )

    @property
    def given_reasoning(self) -> str | None:
        """The reasoning that preceded this message, under either of its names."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of this message, under either of their names."""
        if self.function_call is not None and not self.tool_calls:
            return [ToolCall(id=FUNCTION_CALL_ID, function=self.function_call)]
        return self.tool_calls or []

    def for_template(self) -> dict[str, Any]:
        """A dict of the keys that are set, because templates test for them."""
        content = self.content if self.content is not None else self.refusal or ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.role == "function":
            message |= {"role": "tool", "tool_call_id": FUNCTION_CALL_ID}
        if self.given_reasoning is not None:
            message["reasoning_content"] = message["reasoning"] = message["thinking"] = self.given_reasoning
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class ConversationFields(RequestModel):
    """The fields that decide the prompt; /tokenize has them too."""

    messages: Annotated[Entries[ChatMessage], at_most(MAX_MESSAGES)] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: StrictBool | None = None
    continue_final_message: Off = False
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=64)
    reasoning_effort: ReasoningEffort | None = Field(
        default=None,
        description="A variable of the chat template, with enable_thinking false for none; no effect on other models.",
    )
    tools: Tools | None = None
    documents: Entries[JsonObject] | None = Field(
        default=None, max_length=MAX_DOCUMENTS, description="Documents that the chat template shows to the model."
    )

    def check_conversation(self) -> None:
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]", is_history=True)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt cannot both be true.",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant" or self.messages[-1].content is None:
                raise InvalidRequestError(
                    "continue_final_message needs a last message of role 'assistant' with content.",
                    param="continue_final_message",
                )

    @property
    def template_source(self) -> str | None:
        """A chat template that the request brings."""
        return None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template: those of `reasoning_effort`, then those that the request names itself."""
        effort: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        return effort | (self.chat_template_kwargs or {})

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools that are shown to the model."""
        return self.tools or ()

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the header of an assistant message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatRequest(ConversationFields, GenerationRequest):
    """A conversation and how it is to be completed, `n` times."""

    max_completion_tokens: int | None = integer(1, MAX_INT32, "The newer name of max_tokens; goes before it.")
    thinking_token_budget: int | None = integer(
        NO_BUDGET, MAX_INT32, f"Most tokens of reasoning; it is ended there. {NO_BUDGET} sets no limit."
    )
    logprobs: Off = False
    top_logprobs: int | None = integer(0, MAX_LOGPROBS, "Alternatives to report per token; needs logprobs.")
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: StrictBool | None = None

    @property
    def token_limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().token_limit

    @property
    def effective_tool_choice(self) -> ToolChoice:
        return self.tool_choice or ToolChoice(mode="auto")

    @property
    def shown_tools(self) -> Sequence[Tool]:
        choice = self.effective_tool_choice
        if choice.mode == "none":
            return ()
        if choice.allowed is not None:
            return [tool for tool in self.tools or () if tool.function.name in choice.allowed]
        return self.tools or ()

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools whose input is text."""
        return frozenset(tool.function.name for tool in self.shown_tools if tool.custom is not None)

    @property
    def shows_reasoning(self) -> bool:
        return True

    @property
    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            return None
        return max(len(self.logprob_token_ids), self.top_logprobs or 0)

    def check(self) -> None:
        super().check()
        self.check_conversation()
        if self.tool_choice is not None:
            check_tool_choice(self.tool_choice, self.tools or ())
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
