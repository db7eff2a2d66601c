"""Reading an answer as it grows: first what the model thinks aloud, then text and tool calls."""

from __future__ import annotations

from tessera.app.text.reasoning import REASONING_TAGS, ReasoningSplitter
from tessera.app.tools.parser import ToolParser
from tessera.app.tools.parts import Content, Part, Reasoning


class AnswerReader:
    """One answer's text to its parts."""

    def __init__(
        self, reasoning: ReasoningSplitter | None, tools: ToolParser | None, *, calls_are_forced: bool = False
    ) -> None:
        """`calls_are_forced`: the request named the function, so that calling it is no news."""
        self._splitter = reasoning
        self._tools = tools
        self._calls_are_forced = calls_are_forced
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def thinking(self) -> bool:
        return self._splitter is not None and self._splitter.thinking

    @property
    def ends_with_calls(self) -> bool:
        """Whether an answer that ended by itself reports its calls as the reason.

        OpenAI's API says `stop` for a function that the request named, `tool_calls` for all others.
        """
        return self._tools is not None and self._tools.num_calls > 0 and not self._calls_are_forced

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that must be in the text even where others are skipped."""
        tags = REASONING_TAGS if self._splitter is not None else ()
        return frozenset((*tags, *(self._tools.markers if self._tools is not None else ())))

    @property
    def complete(self) -> bool:
        """No more text is needed: the calls that were asked for are whole."""
        return self._tools is not None and self._tools.complete

    def feed(self, text: str) -> None:
        if self._splitter is not None:
            reasoning, text = self._splitter.feed(text)
            self._reasoning.append(reasoning)
        self._answer(text)

    def finish(self, *, cut: bool) -> None:
        """No more text comes; `cut` where the model was not done with it."""
        if self._splitter is not None:
            reasoning, text = self._splitter.flush()
            self._reasoning.append(reasoning)
            self._answer(text)
        if self._tools is not None:
            self._tools.finish(cut=cut)

    def take(self) -> list[Part]:
        """The parts since the last time."""
        parts: list[Part] = []
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        if reasoning:
            parts.append(Reasoning(reasoning))
        if self._tools is not None:
            return parts + self._tools.take()
        content = "".join(self._content)
        self._content.clear()
        if content:
            parts.append(Content(content))
        return parts

    def _answer(self, text: str) -> None:
        if not text:
            return
        if self._tools is not None:
            self._tools.feed(text)
        else:
            self._content.append(text)
