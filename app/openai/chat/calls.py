"""Calls as chat completions write them: of functions, of custom tools, and in the older form `function_call`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.app.generate.generation import FinishReason
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.tools.parts import CallArguments, CallStart, Part


class CallForm:
    """Form of the tool calls in one request's completions.

    Args:
        custom_tools: names of the tools whose input is text.
        is_older: there is one call at most, and it is a `function_call`.
    """

    def __init__(self, custom_tools: frozenset[str] = frozenset(), *, is_older: bool = False) -> None:
        self._is_older = is_older
        self._custom_tools = custom_tools

    @classmethod
    def of(cls, request: ChatCompletionRequest) -> CallForm:
        return cls(request.custom_tools, is_older=request.uses_functions)

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self._is_older else reason

    def message_fields(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The fields of a message that hold the calls of a completion; none where there are no calls."""
        calls = tool_calls(parts, self._custom_tools)
        if not calls:
            return {}
        return {"function_call": calls[0]["function"]} if self._is_older else {"tool_calls": calls}

    def start(self, part: CallStart) -> dict[str, Any]:
        """The delta that begins a call."""
        call = _call(part, "", self._custom_tools)
        return {"function_call": call["function"]} if self._is_older else _delta({"index": part.index, **call})

    def arguments(self, part: CallArguments, name: str) -> dict[str, Any]:
        """The delta with a piece of the arguments of a call of the tool `name`."""
        if self._is_older:
            return {"function_call": {"arguments": part.text}}
        if name in self._custom_tools:
            return _delta({"index": part.index, "custom": {"input": part.text}})
        return _delta({"index": part.index, "function": {"arguments": part.text}})


PLAIN_CALLS = CallForm()


def tool_calls(parts: Sequence[Part], custom_tools: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """The calls of a completion, each with all of its arguments or its input."""
    starts = [part for part in parts if isinstance(part, CallStart)]
    texts: list[list[str]] = [[] for _ in starts]
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index].append(part.text)
    return [_call(start, "".join(texts[start.index]), custom_tools) for start in starts]


def _call(start: CallStart, text: str, custom_tools: frozenset[str]) -> dict[str, Any]:
    if start.name in custom_tools:
        return {"id": start.id, "type": "custom", "custom": {"name": start.name, "input": text}}
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": text}}


def _delta(call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [call]}
