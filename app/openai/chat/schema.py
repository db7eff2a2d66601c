"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StrictBool, model_validator

from tessera.app.schema.chat import ChatRequest
from tessera.app.schema.examples import HELLO, WEATHER_FUNCTION
from tessera.app.schema.fields import Entries, Metadata, Off, On, Text, TextContent, text_of, wrong
from tessera.app.schema.generation_fields import GenerationRequest
from tessera.app.schema.request import FieldValues, RequestModel
from tessera.app.schema.tools import (
    MAX_TOOLS,
    NamedTool,
    Tool,
    ToolChoice,
    ToolFunction,
    check_tool_choice,
    functions_as_tools,
)


def _function_call(value: Any) -> ToolChoice | None:
    if value is None or isinstance(value, ToolChoice):
        return value
    if value in ("none", "auto"):
        return ToolChoice.model_validate({"mode": value})
    name = value.get("name") if type(value) is dict else None
    if type(name) is not str:
        raise wrong('must be "none", "auto" or {"name": ...}')
    return ToolChoice(mode="function", name=name)


class Prediction(BaseModel):
    """Predicted outputs: a text that the completion will repeat in large part."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["content"]
    content: Annotated[str, PlainValidator(lambda value: text_of(value, {"text": "text"}), TextContent)]


class ChatCompletionRequest(ChatRequest):
    """A conversation, `n` completions of it."""

    refused: ClassVar[FieldValues] = {
        **GenerationRequest.refused,
        "audio": (),
        "modalities": (["text"],),
        "return_prompt_text": (False,),
    }
    hints: ClassVar[FieldValues] = {
        **GenerationRequest.hints,
        "moderation": (),
        "prompt_cache_options": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "messages": HELLO, "max_completion_tokens": 64},
        "streamed": {"model": "MODEL", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}},
        "tools": {"model": "MODEL", "messages": HELLO, "tools": [{"type": "function", "function": WEATHER_FUNCTION}]},
    }

    functions: Entries[ToolFunction] | None = Field(
        default=None, max_length=MAX_TOOLS, description="The older form of tools; one call at most is made."
    )
    function_call: Annotated[
        ToolChoice | None,
        PlainValidator(_function_call, json_schema_input_type=Literal["none", "auto"] | NamedTool | None),
        Field(description="The older form of tool_choice."),
    ] = None
    chat_template: Text | None = Field(
        default=None, description="Instead of the model's own; only where the server was started to take it."
    )
    echo: Off = Field(default=False, description="Begin with the assistant's message that is continued.")
    include_reasoning: On = Field(default=True, description="false: the reasoning is left out of the response.")
    metadata: Metadata | None = None
    prediction: Prediction | None = Field(
        default=None,
        description="A text that the completion will repeat in large part, which makes it faster where the server "
        "drafts tokens (`--speculation`), and never another.",
    )
    store: StrictBool | None = Field(default=None, description="true: the completion is stored.")

    @model_validator(mode="before")
    @classmethod
    def _one_call_of_functions(cls, value: Any) -> Any:
        if type(value) is dict and value.get("functions"):
            return {**value, "parallel_tool_calls": False}
        return value

    @cached_property
    def _functions_as_tools(self) -> Sequence[Tool]:
        return functions_as_tools(self.functions or ())

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning

    @property
    def template_source(self) -> str | None:
        return self.chat_template

    @property
    def effective_tool_choice(self) -> ToolChoice:
        if self.uses_functions and self.function_call is not None:
            return self.function_call
        return super().effective_tool_choice

    @property
    def shown_tools(self) -> Sequence[Tool]:
        if self.uses_functions:
            return self._functions_as_tools if self.effective_tool_choice.mode != "none" else ()
        return super().shown_tools

    @property
    def uses_functions(self) -> bool:
        """Whether calls are asked for, and to be written, in the older form."""
        return bool(self.functions) and not self.tools

    @property
    def echoed(self) -> str:
        """The text that the completion begins with."""
        last = self.messages[-1]
        return last.content or "" if self.echo and last.role == "assistant" else ""

    def check(self) -> None:
        super().check()
        tools = self._functions_as_tools if self.functions else ()  # where a large body is worked on in a thread
        if self.function_call is not None:
            check_tool_choice(self.function_call, tools, "function_call")


class StoredCompletionUpdate(RequestModel):
    """Metadata in place of those that a stored completion has."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"metadata": {"topic": "y"}}}

    metadata: Metadata | None
