"""All phrasings by the skill that they ask for."""

from __future__ import annotations

from tessera.engine.builtin.training.phrasings import (
    arithmetic,
    chat,
    extraction,
    lists,
    memory,
    reading,
    system,
    tools,
)
from tessera.engine.builtin.training.phrasings.phrasing import Phrasings

_TOOLS = tuple(tools.REQUESTS.values())
_MEMORY = tuple(value for value in vars(memory).values() if isinstance(value, Phrasings))

BY_SKILL: dict[str, tuple[Phrasings, ...]] = {
    "greeting": (chat.GREETING, chat.IDENTITY, chat.ABILITIES, chat.THANKS, chat.BYE),
    "system prompt": (system.NAMED, system.ENDING, system.OPENING, system.CAPITALS, system.PLAIN),
    "unknown": (chat.UNKNOWN,),
    "addition": (arithmetic.ADDITION,),
    "subtraction": (arithmetic.SUBTRACTION,),
    "multiplication": (arithmetic.MULTIPLICATION,),
    "copying": (lists.COPYING, lists.COPYING_ONE),
    "reversing": (lists.REVERSING, lists.REVERSING_ONE),
    "upper-casing": (lists.UPPER_CASING, lists.UPPER_CASING_ONE),
    "sorting": (lists.SORTING,),
    "reading": (reading.READING,),
    "memory": _MEMORY,
    "extraction": (extraction.EXTRACTION,),
    "tool call": _TOOLS,
    "tool result": _TOOLS,
    "no tool": _TOOLS,
}
