"""A conversation as the chat API sees it, and how cases are kept out of training."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

Split = Literal["train", "test"]
Message = dict[str, Any]
Item = TypeVar("Item")

HELD_OUT_SHARE = 8  # one case in eight is never trained on


@dataclass
class Conversation:
    """Messages in OpenAI's form; the last is the assistant's answer that is judged.

    Attributes:
        skill: which generator made it.
        messages: roles system, user, assistant and tool.
        tools: OpenAI tool definitions offered, or empty.
    """

    skill: str
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def system(self, content: str) -> Conversation:
        self.messages.append({"role": "system", "content": content})
        return self

    def user(self, content: str) -> Conversation:
        self.messages.append({"role": "user", "content": content})
        return self

    def assistant(self, content: str) -> Conversation:
        self.messages.append({"role": "assistant", "content": content})
        return self

    def call(self, name: str, arguments: dict[str, Any]) -> Conversation:
        function = {"name": name, "arguments": arguments}
        self.messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        )
        return self

    def tool_result(self, result: dict[str, Any]) -> Conversation:
        self.messages.append({"role": "tool", "content": json.dumps(result)})
        return self


def is_held_out(*parts: object) -> bool:
    """Whether a case belongs to the test split; depends on nothing but its parts."""
    return zlib.crc32("\x1f".join(map(str, parts)).encode()) % HELD_OUT_SHARE == 0


def in_split(split: Split, *parts: object) -> bool:
    return is_held_out(*parts) == (split == "test")


def draw(rng: Random, split: Split, make: Callable[[Random], Item], name: str) -> Item:
    """Call `make` until it gives an item of the split."""
    while True:
        item = make(rng)
        if in_split(split, name, item):
            return item


def choose(rng: Random, split: Split, items: Sequence[Item], name: str) -> Item:
    """An item of the split, uniformly."""
    return draw(rng, split, lambda r: r.choice(items), name)


class Wording:
    """Sentences made of one alternative from each part; whole combinations are held out.

    Alternatives may have fields in braces, filled by `say`.
    """

    def __init__(self, *parts: Sequence[str]) -> None:
        self.parts = parts

    def say(self, rng: Random, split: Split, **values: object) -> str:
        picked = draw(rng, split, lambda r: tuple(r.choice(part) for part in self.parts), "wording")
        return "".join(picked).format(**values)
