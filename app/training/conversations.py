"""Files of chats to train on: OpenAI's JSON lines, each checked.

A line is an object with `messages`, and `tools` if any were offered. An assistant's message may have a `weight`, 0 or
1: those of weight 0 are context alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from tessera.app.schema.chat import MAX_MESSAGES, ChatMessage
from tessera.app.schema.request import RequestModel, parse_request
from tessera.app.schema.tools import Tools
from tessera.engine.contract.errors import ConfigError, InvalidRequestError

MAX_SHOWN_ERRORS = 10
MAX_LINE_BYTES = 2**26


class TrainingMessage(ChatMessage):
    """One message; `weight` is for the assistant's."""

    weight: Literal[0, 1] | None = None

    @property
    def is_trained(self) -> bool:
        return self.role == "assistant" and self.weight != 0


class TrainingConversation(RequestModel):
    """A line of the file."""

    messages: Annotated[list[TrainingMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for fields that are valid alone but not together."""
        for index, message in enumerate(self.messages):
            path = f"messages[{index}]"
            message.check(path)
            if message.weight is not None and message.role != "assistant":
                raise InvalidRequestError(f"{path}.weight is for messages of the assistant alone.", param="messages")
        if self.messages[-1].role != "assistant":
            raise InvalidRequestError("The last message must be the assistant's, which is learnt.", param="messages")
        if not any(message.is_trained for message in self.messages):
            raise InvalidRequestError(
                "Every message of the assistant has the weight 0, so there is nothing to learn.", param="messages"
            )


def read_conversations(path: Path) -> list[tuple[int, TrainingConversation]]:
    """With the number of each one's line, counted from 1.

    Raises: ConfigError with all that is wrong, up to a number of lines.
    """
    found: list[tuple[int, TrainingConversation]] = []
    wrong: list[str] = []
    for number, line in _lines(path):
        try:
            found.append((number, _conversation(line)))
        except InvalidRequestError as error:
            wrong.append(f"line {number}: {error.message}")
    if wrong:
        more = f"\n  and {len(wrong) - MAX_SHOWN_ERRORS} more" if len(wrong) > MAX_SHOWN_ERRORS else ""
        listed = "".join(f"\n  {sentence}" for sentence in wrong[:MAX_SHOWN_ERRORS])
        raise ConfigError(f"{path} has {len(wrong)} line{'s' if len(wrong) > 1 else ''} at fault:{listed}{more}")
    if not found:
        raise ConfigError(f'{path} has no chats; a line is {{"messages": [...]}}')
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Without empty ones."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _conversation(line: bytes) -> TrainingConversation:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequestError(f"It has more than {MAX_LINE_BYTES} bytes.")
    try:
        body: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"It is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidRequestError('It must be an object, {"messages": [...]}.')
    conversation = parse_request(TrainingConversation, body)
    conversation.check()
    return conversation
