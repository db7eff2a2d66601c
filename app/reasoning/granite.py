"""Granite: two sentences around the reasoning (3.2), or `<think>...</think><response>...</response>` (3.3).

Both are turned on by `thinking`. Sources: the chat templates of ibm-granite/granite-3.2-8b-instruct and
granite-3.3-8b-instruct.
"""

from __future__ import annotations

from tessera.app.reasoning.format import ReasoningFormat

GRANITE_32 = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
GRANITE_33 = ReasoningFormat(answer_tags=("<response>", "</response>"))


def granite(template: str) -> ReasoningFormat | None:
    if GRANITE_32.begin in template:
        return GRANITE_32
    return GRANITE_33 if "<response></response>" in template else None
