"""Reading the parts of a completion in tests of tool parsers."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.app.tools.parts import CallArguments, CallStart, Content, Part

Message = tuple[str | None, list[tuple[str, str]]]  # content; name and arguments of each call


def message_of(parts: Sequence[Part]) -> Message:
    """Content, None where there are only calls, and the calls."""
    names = [part.name for part in parts if isinstance(part, CallStart)]
    texts = ["" for _ in names]
    for part in parts:
        if isinstance(part, CallArguments):
            texts[part.index] += part.text
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content if content or not names else None, list(zip(names, texts, strict=True))
