"""A line of a file to learn from, in OpenAI's format: a chat, or a prompt with two completions of which one is better.

An assistant's message may have a `weight`, 0 or 1: those of weight 0 are context alone.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tessera.app.schema.chat import MAX_MESSAGES, ChatMessage
from tessera.app.schema.request import RequestModel
from tessera.app.schema.tools import MAX_TOOLS, Tool, ToolFunction, Tools, functions_as_tools
from tessera.engine.contract.errors import InvalidRequestError

MAX_TRAINED_MESSAGES = 512  # of one chat: all before it is rendered for each of them


class TrainingMessage(ChatMessage):
    """One message; `weight` is for the assistant's."""

    weight: Literal[0, 1] | None = None

    @property
    def is_trained(self) -> bool:
        return self.role == "assistant" and self.weight != 0


class TrainingConversation(RequestModel):
    """A chat."""

    messages: Annotated[list[TrainingMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    functions: Annotated[list[ToolFunction] | None, Field(max_length=MAX_TOOLS)] = None
    parallel_tool_calls: bool | None = None

    @property
    def shown_tools(self) -> list[Tool]:
        """`functions` are the older form of `tools`."""
        return self.tools or functions_as_tools(self.functions or ())

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        for index, message in enumerate(self.messages):
            path = f"messages[{index}]"
            message.check(path)
            if message.weight is not None and message.role != "assistant":
                raise InvalidRequestError(f"{path}.weight is for messages of the assistant alone.", param="messages")
        if self.messages[-1].role != "assistant":
            raise InvalidRequestError("The last message must be the assistant's, which is learnt.", param="messages")
        num_trained = sum(message.is_trained for message in self.messages)
        if num_trained > MAX_TRAINED_MESSAGES:
            raise InvalidRequestError(
                f"A chat may have at most {MAX_TRAINED_MESSAGES} messages of the assistant to learn: split it.",
                param="messages",
            )
        if not num_trained:
            raise InvalidRequestError(
                "Every message of the assistant has the weight 0, so there is nothing to learn.", param="messages"
            )


class PreferenceInput(BaseModel):
    """The prompt of a preference."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None


class TrainingPreference(RequestModel):
    """Two completions of one prompt."""

    input: PreferenceInput
    preferred_output: Annotated[list[ChatMessage], Field(min_length=1, max_length=1)]
    non_preferred_output: Annotated[list[ChatMessage], Field(min_length=1, max_length=1)]

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        for index, message in enumerate(self.input.messages):
            message.check(f"input.messages[{index}]")
        if self.input.messages[-1].role == "assistant":
            raise InvalidRequestError("The last message of input must not be the assistant's.", param="input")
        for name in ("preferred_output", "non_preferred_output"):
            (message,) = getattr(self, name)
            message.check(f"{name}[0]")
            if message.role != "assistant":
                raise InvalidRequestError(f"{name}[0] must be a message of the assistant.", param=name)
        if self.preferred_output == self.non_preferred_output:
            raise InvalidRequestError("preferred_output and non_preferred_output are the same.", param="input")

    def conversations(self) -> tuple[TrainingConversation, TrainingConversation]:
        """The prompt with the preferred completion and with the other, which alone are learnt."""
        prompt = [_with_weight(message, 0) for message in self.input.messages]
        preferred, rejected = (
            TrainingConversation.model_construct(messages=[*prompt, _with_weight(message, 1)], tools=self.input.tools)
            for (message,) in (self.preferred_output, self.non_preferred_output)
        )
        return preferred, rejected


def _with_weight(message: ChatMessage, weight: Literal[0, 1]) -> TrainingMessage:
    return TrainingMessage.model_construct(**dict(message), weight=weight)
