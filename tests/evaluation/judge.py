"""Ask a chat server for the last answer of a conversation and say whether it is exactly right."""

from __future__ import annotations

import json
from typing import Any

from tessera.engine.builtin.training.conversation import Conversation, Message, Split

SPLITS: dict[str, Split] = {"usual": "test", "held-out": "phrasings"}  # by the phrasings of what is asked


def request_of(conversation: Conversation, model: str) -> dict[str, Any]:
    """The body of a greedy chat request for the conversation's last answer."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_wire(message, index) for index, message in enumerate(conversation.messages[:-1])],
        "temperature": 0,
        "max_tokens": 160,
    }
    if conversation.tools:
        body["tools"] = conversation.tools
    return body


def _wire(message: Message, index: int) -> Message:
    """As clients send it: tool calls with ids and arguments as text, tool results with the id they answer."""
    if message.get("tool_calls"):
        calls = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}
    if message["role"] == "tool":
        return {**message, "tool_call_id": f"call_{index - 1}"}
    return message


def is_right(conversation: Conversation, answer: Message) -> bool:
    """Whether `answer` (a message of the API) is the expected one: same text, or same calls with same arguments."""
    expected = conversation.messages[-1]
    if expected.get("tool_calls"):
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in expected["tool_calls"]]
        return wanted == [_call(call) for call in answer.get("tool_calls") or []]
    return answer.get("content") == expected["content"] and not answer.get("tool_calls")


def _call(call: dict[str, Any]) -> tuple[str, Any]:
    try:
        return call["function"]["name"], json.loads(call["function"]["arguments"])
    except ValueError:
        return call["function"]["name"], None
