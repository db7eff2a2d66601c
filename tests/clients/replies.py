"""Replies of scripted models, by what a prompt has or in their order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CITY = {"city": "Bonn"}
HELLO, SO = "Hello.", "So."
USER, TOOL = "<|im_start|>user\n", "<|im_start|>tool\n"


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


OBJECT = json.dumps(CITY)
TOLD = "It rains."
CALL = call("weather", **CITY)
REPLIES: Mapping[str, str] = {
    "think, then the weather": f"<think>hm</think>{CALL}",
    "weather": CALL,
    "a city": OBJECT,
    "think": f"<think>hm</think>{SO}",
}


def by_prompt(prompt: str, replies: Mapping[str, str] = REPLIES) -> str:
    """The reply to a prompt: that of the first text that the last user's turn has, or what a tool found.

    Clients that ask again, or several times at once, get the same in any order.
    """
    turn = prompt.rpartition(USER)[2]
    if TOOL in turn:
        return TOLD
    return next((reply for text, reply in replies.items() if text in turn), HELLO)


def in_turn(replies: Sequence[str]) -> Callable[[str], str]:
    """The replies one after the other, then the last one for ever."""
    waiting = list(replies)
    return lambda prompt: waiting.pop(0) if len(waiting) > 1 else waiting[0]


def calls_a_final_tool(prompt: str) -> str:
    """Of pydantic-ai and instructor, whose objects are a call's arguments; Anthropic's too."""
    turn = prompt.rpartition(USER)[2]
    final = re.search(r'"name": "(final_result|\w*City)"', prompt)
    if final is not None and ("weather?" not in turn or TOOL in turn):
        return call(final[1], **CITY)
    return by_prompt(prompt)


def dspy_reply(prompt: str) -> str:
    """In the format that the prompt asks for."""
    told, _, asked = prompt.rpartition(USER)[2].partition("Respond with")
    tool, arguments = ("finish", "{}") if "observation_0" in told else ("weather", json.dumps(CITY))
    replies = {"next_thought": "hm", "next_tool_name": tool, "next_tool_args": arguments, "reasoning": "hm"}
    replies["answer"] = TOLD if "observation_0" in told else SO
    named = [name for name in replies if f"[[ ## {name} ## ]]" in asked]
    if not named:
        return json.dumps({"answer": SO})
    fields = [f"[[ ## {name} ## ]]\n{replies[name]}\n\n" for name in named]
    return f"{''.join(fields)}[[ ## completed ## ]]"
