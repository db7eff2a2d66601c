"""Reading a completion as it grows: reasoning first, then text and tool calls."""

from __future__ import annotations

from tessera.app.generate.prompt import ChatPrompt
from tessera.app.generate.served_model import ServedModel
from tessera.app.schema.chat import ChatRequest
from tessera.app.text.reasoning import REASONING_TAGS, ReasoningSplitter
from tessera.app.tools.parser import ToolParser
from tessera.app.tools.parts import Content, Part, Reasoning


class CompletionReader:
    """Splits one completion's text into its parts."""

    def __init__(
        self, reasoning: ReasoningSplitter | None, tools: ToolParser | None, *, calls_are_forced: bool = False
    ) -> None:
        """`calls_are_forced`: the request named the function that is called."""
        self._splitter = reasoning
        self._tools = tools
        self._calls_are_forced = calls_are_forced
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def in_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.thinking

    @property
    def ends_with_calls(self) -> bool:
        """Whether a completion that ended by itself has the finish reason `tool_calls`.

        In OpenAI's API it is `stop` if the request named the function.
        """
        return self._tools is not None and self._tools.num_calls > 0 and not self._calls_are_forced

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that must stay in the text where others are skipped."""
        tags = REASONING_TAGS if self._splitter is not None else ()
        return frozenset((*tags, *(self._tools.markers if self._tools is not None else ())))

    @property
    def complete(self) -> bool:
        """Whether all calls that were asked for are whole, so that no more text is needed."""
        return self._tools is not None and self._tools.complete

    def read_text(self, text: str) -> None:
        if self._splitter is not None:
            reasoning, text = self._splitter.feed(text)
            self._reasoning.append(reasoning)
        self._read_after_reasoning(text)

    def finish(self, *, cut: bool) -> None:
        """End the text; `cut` if the model was not done with it."""
        if self._splitter is not None:
            reasoning, text = self._splitter.flush()
            self._reasoning.append(reasoning)
            self._read_after_reasoning(text)
        if self._tools is not None:
            self._tools.finish(cut=cut)

    def take_parts(self) -> list[Part]:
        """The parts since the last call."""
        parts: list[Part] = []
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        if reasoning:
            parts.append(Reasoning(reasoning))
        if self._tools is not None:
            return parts + self._tools.take_parts()
        content = "".join(self._content)
        self._content.clear()
        if content:
            parts.append(Content(content))
        return parts

    def _read_after_reasoning(self, text: str) -> None:
        if not text:
            return
        if self._tools is not None:
            self._tools.read_text(text)
        else:
            self._content.append(text)


def completion_reader(model: ServedModel, request: ChatRequest, prompt: ChatPrompt) -> CompletionReader:
    """A reader for one completion of a chat whose model has reasoning, or which has tools."""
    choice = request.effective_tool_choice
    tools = {tool.function.name: tool.function.parameters or {} for tool in request.shown_tools}
    parser = None
    if tools and model.tool_format is not None:
        is_one = request.parallel_tool_calls is False or choice.mode == "function"
        parser = model.tool_format.parser(tools, max_calls=1 if is_one else None)
    splitter = ReasoningSplitter(opened=prompt.reasoning == "open") if model.has_reasoning else None
    return CompletionReader(splitter, parser, calls_are_forced=choice.mode == "function")
