"""A conversation as the chat API sees it, and how cases are kept out of training."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

from tessera.engine.builtin.training.phrasings.phrasing import Phrasings

# `test` has held-out words, names and numbers in wordings that are combined of trained parts; `phrasings` has them in
# whole phrasings that are never trained on.
Split = Literal["train", "test", "phrasings"]
Message = dict[str, Any]
Item = TypeVar("Item")

HELD_OUT_SHARE = 8  # one case in eight is never trained on
PHRASED_SHARE = 0.7  # of trained requests, that are whole phrasings
# Of these, how many begin with a small letter, with one of OPENINGS, or with one of REQUESTS before a verb.
LOWERED_SHARE, OPENED_SHARE, REQUESTED_SHARE = 0.2, 0.2, 0.2
OPENINGS = (
    "Hi, ",
    "Hello. ",
    "Hey, ",
    "OK, ",
    "Hello! ",
    "Please help me. ",
    "Thanks. ",
    "Next one: ",
    "One more thing. ",
)
REQUESTS = (
    "Could you ",
    "Would you ",
    "Can you ",
    "Will you ",
    "I'd like you to ",
    "I want you to ",
    "Please ",
    "please ",
)
_VERB = re.compile(
    "(add|subtract|deduct|take|multiply|calculate|compute|solve|evaluate|work out|increase|decrease|reduce|count|repeat|say"
    "|copy|echo|write|type|reproduce|duplicate|return|give|tell|reverse|put|read|list|turn|flip|swap|mirror|spell|uppercase"
    "|upper-case|capitali[sz]e|make|convert|change|sort|order|arrange|rank|bring|show|extract|fill|create|parse|pull|get"
    "|find|search|look|check|set|send|text|message|translate|play|book|buy|save|store|schedule|plan|switch|activate|start"
    '|explain|describe|recommend|summarise|answer) [\\w{"]',
    re.IGNORECASE,
)


@dataclass
class Conversation:
    """Messages in OpenAI's form; the last is the assistant's answer that is judged.

    Attributes:
        skill: which generator made it.
        messages: roles system, user, assistant and tool.
        tools: OpenAI tool definitions offered, or empty.
        spelt: answers of it that are written letter by letter, a token each, since no other spelling can be read off
            the prompt.
    """

    skill: str
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    spelt: set[str] = field(default_factory=set)

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
    return is_held_out(*parts) == (split != "train")


def draw(rng: Random, split: Split, make: Callable[[Random], Item], name: str) -> Item:
    """Call `make` until it gives an item of the split."""
    while True:
        item = make(rng)
        if in_split(split, name, item):
            return item


def choose(rng: Random, split: Split, items: Sequence[Item], name: str) -> Item:
    """An item of the split, uniformly."""
    return draw(rng, split, lambda r: r.choice(items), name)


def also(split: Split, usual: tuple[Item, ...], *further: Item) -> tuple[Item, ...]:
    """All of them; in the split `test`, whose cases stay as they are, `usual` alone."""
    return usual if split == "test" else usual + further


class Wording:
    """Sentences made of one alternative from each part, whole combinations of which are held out; or whole phrasings.

    Both may have fields in braces, filled by `say`.

    Args:
        phrasings: said in training, too, and alone in the split `phrasings`. Without parts there is nothing else.
        capitalised: combinations begin with a capital.
    """

    def __init__(self, *parts: Sequence[str], phrasings: Phrasings, capitalised: bool = False) -> None:
        self.parts = parts
        self.phrasings = phrasings
        self.capitalised = capitalised

    def say(self, rng: Random, split: Split, **values: object) -> str:
        if split == "phrasings":
            return rng.choice(self.phrasings.held_out).format(**values)
        if split == "train" and (not self.parts or rng.random() < PHRASED_SHARE):
            return _varied(rng, rng.choice(self.phrasings.trained)).format(**values)
        picked = draw(rng, split, lambda r: tuple(r.choice(part) for part in self.parts), "wording")
        said = "".join(picked).format(**values)
        return said[:1].upper() + said[1:] if self.capitalised else said


def _varied(rng: Random, phrasing: str) -> str:
    """Sometimes with a courtesy before it, sometimes with a small first letter."""
    kind = rng.random()
    lowered = phrasing[:1].lower() + phrasing[1:]
    if kind < REQUESTED_SHARE and _VERB.match(phrasing):
        return rng.choice(REQUESTS) + lowered
    if kind > 1 - OPENED_SHARE and phrasing[0].isalpha():
        return rng.choice(OPENINGS) + phrasing
    if REQUESTED_SHARE < kind < REQUESTED_SHARE + LOWERED_SHARE and phrasing[1:2].islower():
        return lowered
    return phrasing
