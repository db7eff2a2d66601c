"""Message content: a string, or a list of parts of which only those with text are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tessera.app.schema.fields import MAX_TEXT, Text, wrong

MAX_PARTS = 1024


class TextPart(BaseModel):
    """How a part looks in Chat Completions and in Anthropic's Messages."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["text"]
    text: Text


TextContent = Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]


def text_of(value: Any, keys: Mapping[str, str]) -> str:
    """Text as it is, text parts joined by line ends; other parts are refused and nothing is fetched.

    Args:
        keys: the types of part that are read, each with the name of the field that has its text.
    """
    if type(value) is str:
        return _bounded(value)
    if type(value) is not list or len(value) > MAX_PARTS:
        raise wrong(f"must be a string or a list of at most {MAX_PARTS} text parts")
    texts = []
    for part in value:
        kind = part.get("type") if type(part) is dict else None
        if type(kind) is not str or kind not in keys:
            shown = kind[:40] if type(kind) is str else "unknown"
            raise wrong(f"has a part of type '{shown}', but this model reads text parts only")
        text = part.get(keys[kind])
        if type(text) is not str:
            raise wrong(f"has a {kind} part whose '{keys[kind]}' is not a string")
        texts.append(text)
    return _bounded("\n".join(texts))


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise wrong(f"may have at most {MAX_TEXT} characters, not {len(text)}")
    return text
