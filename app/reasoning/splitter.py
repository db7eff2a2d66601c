"""Reasoning is told from the content in a text that arrives in pieces."""

from __future__ import annotations

import re
from typing import Literal

from tessera.app.reasoning.format import THINK, ReasoningFormat


class ReasoningSplitter:
    """Splits one completion; the outcome does not depend on how it was cut.

    Line ends around the reasoning and before the answer are layout and are dropped.
    """

    def __init__(self, format: ReasoningFormat = THINK, *, opened: bool) -> None:
        """`opened`: the text begins within the reasoning."""
        self._format = format
        self._find_end = re.compile("|".join(map(re.escape, format.ends))).search
        self._opened = opened
        self._state: Literal["before", "start", "within", "after", "tag", "tagged", "closing", "answer"] = "before"
        self._held = ""  # of a tag that may be coming
        self._space: list[str] = []  # white space that may prove to be layout

    @property
    def tags(self) -> tuple[str, ...]:
        return self._format.tags

    @property
    def thinking(self) -> bool:
        """The text so far ends within the reasoning."""
        return self._state in ("start", "within") or (self._opened and self._state == "before")

    def split_text(self, text: str) -> tuple[str, str]:
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
            text = self._after(text)
        if self._state == "tag":
            text = text.lstrip("\n")
            if text:
                self._state = "tagged"
        if self._state in ("tagged", "closing"):
            text = self._tagged(text)
        return reasoning, text if self._state in ("answer", "tagged", "closing") else ""

    def flush(self) -> tuple[str, str]:
        """-> (reasoning, answer) that were held back, now that no more text comes."""
        if self._state == "closing":
            return "", ""
        held = "".join(self._space) + self._held
        if self._state == "after":
            held = held.lstrip("\n")
        return (held, "") if self.thinking else ("", held)

    def _before(self, text: str) -> str:
        """Text after the beginning of the reasoning, or all of it where there can be none."""
        body = text.lstrip()
        self._space.append(text[: len(text) - len(body)])
        begin = next(filter(body.startswith, self._format.begins), None)
        if begin is not None:
            self._state = "start"
            body = body[len(begin) :]
        elif any(begin.startswith(body) for begin in self._format.begins):
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
        found = self._find_end(text)
        if found is None:
            sure = len(text) - _prefix_length(text, self._format.ends)
            self._held = text[sure:]
            return self._without_tail(text[:sure]), ""
        reasoning = self._without_tail(text[: found.start()])
        self._space.clear()
        self._state = "after"
        return reasoning, text[found.end() :]

    def _after(self, text: str) -> str:
        """The answer, without the tag before it."""
        tags = self._format.answer_tags
        body = text.lstrip("\n" if tags is None else None)
        if tags is None:
            if body:
                self._state = "answer"
            return body
        self._space.append(text[: len(text) - len(body)])
        if body.startswith(tags[0]):
            self._state = "tag"
            body = body[len(tags[0]) :]
        elif tags[0].startswith(body):
            self._held = body
            return ""
        else:
            self._state = "answer"
            body = "".join(self._space).lstrip("\n") + body
        self._space.clear()
        return body

    def _tagged(self, text: str) -> str:
        """The answer up to its closing tag, which is dropped with the white space before it if nothing follows it."""
        assert self._format.answer_tags is not None
        tag = self._format.answer_tags[1]
        if self._state == "closing":
            if not text.strip():
                self._space.append(text)
                return ""
            text = "".join(self._space) + text
            self._space.clear()
            self._state = "answer"
            return text
        found = text.find(tag)
        if found < 0:
            sure = len(text) - _prefix_length(text, (tag,))
            self._held = text[sure:]
            return self._without_tail(text[:sure])
        body = self._without_tail(text[:found])
        rest = text[found + len(tag) :]
        self._space.append(tag + rest)
        if rest.strip():
            body += "".join(self._space)
            self._space.clear()
            self._state = "answer"
        else:
            self._state = "closing"
        return body

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


def _prefix_length(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest beginning of one of the tags that `text` ends with."""
    for length in range(min(max(map(len, tags)) - 1, len(text)), 0, -1):
        ending = text[-length:]
        if any(tag.startswith(ending) for tag in tags):
            return length
    return 0
