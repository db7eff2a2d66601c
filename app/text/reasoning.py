"""Reasoning: `<think>...</think>` at the beginning of a completion is told from the text after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tessera.app.settings import ReasoningParserName

BEGIN = "<think>"
END = "</think>"
REASONING_TAGS = (BEGIN, END)

# Where an answer begins: with no reasoning to come, with reasoning if the model likes, or within it.
ReasoningStart = Literal["none", "possible", "open"]


class ReasoningSplitter:
    """Splits a text that arrives in pieces; the outcome does not depend on how it was cut.

    Line ends around the reasoning and before the answer are layout and are dropped.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends with `<think>`, so that the text begins within the reasoning."""
        self._opened = opened
        self._state: Literal["before", "start", "within", "after", "answer"] = "before"
        self._held = ""  # of a tag that may be coming
        self._space: list[str] = []  # white space that may prove to be layout

    @property
    def thinking(self) -> bool:
        """The text so far ends within the reasoning."""
        return self._state in ("start", "within") or (self._opened and self._state == "before")

    def feed(self, text: str) -> tuple[str, str]:
        """-> (reasoning, answer) that are sure now."""
        if self._state == "answer":
            return "", text
        text = self._held + text
        self._held = ""
        reasoning = ""
        if self._state == "before":
            text = self._before(text)
        if self._state == "start":
            text = text.lstrip("\n")
            if text:
                self._state = "within"
        if self._state == "within":
            reasoning, text = self._within(text)
        if self._state == "after":
            text = text.lstrip("\n")
            if text:
                self._state = "answer"
        return reasoning, text if self._state == "answer" else ""

    def flush(self) -> tuple[str, str]:
        """-> (reasoning, answer) that were held back, now that no more text comes."""
        held = "".join(self._space) + self._held
        return (held, "") if self.thinking else ("", held)

    def _before(self, text: str) -> str:
        """What follows the opening tag, or the whole text where there can be no tag."""
        body = text.lstrip()
        self._space.append(text[: len(text) - len(body)])
        if body.startswith(BEGIN):
            self._state = "start"
            body = body[len(BEGIN) :]
        elif BEGIN.startswith(body):
            self._held = body
            return ""
        elif self._opened:
            self._state = "start"
        else:
            self._state = "answer"
            body = "".join(self._space) + body
        self._space.clear()
        return body

    def _within(self, text: str) -> tuple[str, str]:
        end = text.find(END)
        if end < 0:
            sure = len(text) - _prefix_length(text, END)
            self._held = text[sure:]
            return self._without_tail(text[:sure]), ""
        reasoning = self._without_tail(text[:end])
        self._space.clear()
        self._state = "after"
        return reasoning, text[end + len(END) :]

    def _without_tail(self, text: str) -> str:
        """The text without white space at its end, which is kept; what was kept before goes first."""
        body = text.rstrip()
        tail = text[len(body) :]
        if body:
            body = "".join(self._space) + body
            self._space.clear()
        if tail:
            self._space.append(tail)
        return body


def _prefix_length(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag` that `text` ends with."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def has_reasoning(choice: ReasoningParserName, templates: Iterable[str]) -> bool:
    """Whether completions may have reasoning: as asked for, or with `auto` where the templates know its tags."""
    if choice == "auto":
        return any(BEGIN in source and END in source for source in templates)
    return choice == "think"


def reasoning_start(prompt: str, continued: str | None) -> ReasoningStart:
    """Whether a completion begins with reasoning, within it or without, for a model that has reasoning.

    Args:
        prompt: the conversation as the template rendered it.
        continued: the text of the final message where the model continues it.
    """
    if continued is not None:
        return "open" if continued.rfind(BEGIN) > continued.rfind(END) else "none"
    ending = prompt.rstrip()
    return "open" if ending.endswith(BEGIN) else "none" if ending.endswith(END) else "possible"
