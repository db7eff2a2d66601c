"""Reading a completion as it grows: reasoning first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Callable

from tessera.app.generate.custom_input import CustomInput
from tessera.app.generate.prompt import ChatPrompt
from tessera.app.generate.served_model import ServedModel
from tessera.app.reasoning.splitter import ReasoningSplitter
from tessera.app.schema.chat import ChatRequest
from tessera.app.tools.harmony.parser import HarmonyParser
from tessera.app.tools.parser import ToolParser
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning


class CompletionReader:
    """Splits one completion's text into its parts."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        tools: ToolParser | None,
        *,
        calls_are_forced: bool = False,
        custom_tools: frozenset[str] = frozenset(),
        shows_reasoning: bool = True,
    ) -> None:
        """
        Args:
            calls_are_forced: the request named the function that is called.
            custom_tools: names of tools whose arguments are given out as text.
            shows_reasoning: false leaves the reasoning out.
        """
        self._splitter = reasoning
        self._tools = tools
        self._calls_are_forced = calls_are_forced
        self._custom_tools = custom_tools
        self._shows_reasoning = shows_reasoning
        self._custom_inputs: dict[int, CustomInput] = {}
        self._is_finished = False
        self._reasoning: list[str] = []
        self._content: list[str] = []

    @property
    def in_reasoning(self) -> bool:
        if self._splitter is not None:
            return self._splitter.thinking
        return self._tools is not None and self._tools.thinking

    @property
    def ends_with_calls(self) -> bool:
        """Whether a completion that ended by itself has the finish reason `tool_calls`.

        In OpenAI's API it is `stop` if the request named the function.
        """
        return self._tools is not None and self._tools.num_calls > 0 and not self._calls_are_forced

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that must stay in the text where others are skipped."""
        tags = self._splitter.tags if self._splitter is not None else ()
        return frozenset((*tags, *(self._tools.markers if self._tools is not None else ())))

    @property
    def complete(self) -> bool:
        """Whether all calls that were asked for are whole, so that no more text is needed."""
        return self._tools is not None and self._tools.complete

    def read_text(self, text: str) -> None:
        if self._splitter is not None:
            reasoning, text = self._splitter.split_text(text)
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
        self._is_finished = True

    def take_parts(self) -> list[Part]:
        """The parts since the last call."""
        parts: list[Part] = []
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        if reasoning and self._shows_reasoning:
            parts.append(Reasoning(reasoning))
        if self._tools is not None:
            calls = self._tools.take_parts()
            if not self._shows_reasoning:
                calls = [part for part in calls if not isinstance(part, Reasoning)]
            return parts + (self._with_custom_inputs(calls) if self._custom_tools else calls)
        content = "".join(self._content)
        self._content.clear()
        if content:
            parts.append(Content(content))
        return parts

    def _with_custom_inputs(self, parts: list[Part]) -> list[Part]:
        """The parts, with the inputs of custom tools in place of their arguments."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, CallStart) and part.name in self._custom_tools:
                self._custom_inputs[part.index] = CustomInput()
            if isinstance(part, CallArguments) and part.index in self._custom_inputs:
                text = self._custom_inputs[part.index].read_arguments(part.text)
                found += [CallArguments(part.index, text)] if text else []
            else:
                found.append(part)
        if self._is_finished:
            rests = [(index, custom.finish()) for index, custom in self._custom_inputs.items()]
            found += [CallArguments(index, rest) for index, rest in rests if rest]
        return found

    def _read_after_reasoning(self, text: str) -> None:
        if not text:
            return
        if self._tools is not None:
            self._tools.read_text(text)
        else:
            self._content.append(text)


def reader_maker(model: ServedModel, request: ChatRequest, prompt: ChatPrompt) -> Callable[[], CompletionReader]:
    """Makes a reader for each completion of a chat whose model has reasoning, or which has tools."""
    choice = request.effective_tool_choice
    tools = {tool.function.name: tool.function.parameters or {} for tool in request.shown_tools}
    custom_tools, shows_reasoning = request.custom_tools, request.shows_reasoning
    is_one = request.parallel_tool_calls is False or choice.mode == "function"

    def make() -> CompletionReader:
        parser: ToolParser | None = None
        if tools and model.tool_format is not None:
            parser = model.tool_format.parser(tools, max_calls=1 if is_one else None)
        splitter = None
        if model.reasoning is not None and model.reasoning.has_channels:
            continues = prompt.reasoning == "none"
            parser = HarmonyParser(tools, max_calls=1 if tools and is_one else None, continues=continues)
        elif model.reasoning is not None:
            splitter = ReasoningSplitter(model.reasoning, opened=prompt.reasoning == "open")
        return CompletionReader(
            splitter,
            parser,
            calls_are_forced=choice.mode == "function",
            custom_tools=custom_tools,
            shows_reasoning=shows_reasoning,
        )

    return make
