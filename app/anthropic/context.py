"""`context_management`: edits that shorten a conversation's history before it is read.

Source: https://platform.claude.com/docs/en/build-with-claude/context-editing
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from tessera.app.anthropic.blocks import Block, Message, ThinkingBlock, ToolResultBlock, ToolUseBlock, TypeOrOther
from tessera.app.schema.fields import MAX_INT32, MAX_NAME, Entries, TextPart, at_most
from tessera.app.schema.request import log_once

MAX_EDITS = 16
MAX_EXCLUDED = 1024
CLEARED = "[Old tool result content cleared]"
DEFAULT_TRIGGER_TOKENS = 100_000
DEFAULT_KEPT_TOOL_USES = 3

Names = Annotated[Entries[Annotated[str, Field(max_length=MAX_NAME)]], Field(max_length=MAX_EXCLUDED)]
CountTokens: TypeAlias = Callable[[Sequence[Message]], Awaitable[int]]


class InputTokens(Block):
    type: Literal["input_tokens"]
    value: int = Field(ge=0, le=MAX_INT32)


class ToolUses(Block):
    type: Literal["tool_uses"]
    value: int = Field(ge=0, le=MAX_INT32)


class ThinkingTurns(Block):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1, le=MAX_INT32)


class AllTurns(Block):
    type: Literal["all"]


class ClearToolUses(Block):
    """Replaces old results of tools, and their calls' inputs if asked to, once the prompt is long enough."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Discriminator("type")] = InputTokens(
        type="input_tokens", value=DEFAULT_TRIGGER_TOKENS
    )
    keep: ToolUses = ToolUses(type="tool_uses", value=DEFAULT_KEPT_TOOL_USES)
    clear_at_least: InputTokens | None = None
    exclude_tools: Names | None = None
    clear_tool_inputs: bool | Names | None = None

    async def edit(self, messages: Sequence[Message], count: CountTokens) -> tuple[Sequence[Message], Any]:
        """-> (messages, report); the report is None where nothing was cleared."""
        uses = [block for message in messages for block in message.content if isinstance(block, ToolUseBlock)]
        excluded = self.exclude_tools or ()
        old = {use.id: use.name for use in uses[: max(0, len(uses) - self.keep.value)] if use.name not in excluded}
        results = [block for message in messages for block in message.content if isinstance(block, ToolResultBlock)]
        cleared = {block.tool_use_id for block in results if block.tool_use_id in old and block.text != CLEARED}
        if not cleared or (isinstance(self.trigger, ToolUses) and len(uses) <= self.trigger.value):
            return messages, None
        before = await count(messages)
        if isinstance(self.trigger, InputTokens) and before <= self.trigger.value:
            return messages, None
        edited = [
            _with_blocks(message, [self._edited(block, cleared) for block in message.content]) for message in messages
        ]
        saved = before - await count(edited)
        if saved <= 0 or (self.clear_at_least is not None and saved < self.clear_at_least.value):
            return messages, None
        return edited, {"type": self.type, "cleared_tool_uses": len(cleared), "cleared_input_tokens": saved}

    def _edited(self, block: Any, cleared: set[str]) -> Any:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
            return block.model_copy(update={"content": [TextPart(type="text", text=CLEARED)]})
        if isinstance(block, ToolUseBlock) and block.id in cleared and self._clears_input(block.name):
            return block.model_copy(update={"input": {}})
        return block

    def _clears_input(self, name: str) -> bool:
        chosen = self.clear_tool_inputs
        return chosen if isinstance(chosen, bool) else chosen is not None and name in chosen


class ClearThinking(Block):
    """Takes the reasoning out of all turns of the assistant but the last ones."""

    type: Literal["clear_thinking_20251015"]
    keep: ThinkingTurns | AllTurns | Literal["all"] = ThinkingTurns(type="thinking_turns", value=1)

    async def edit(self, messages: Sequence[Message], count: CountTokens) -> tuple[Sequence[Message], Any]:
        """-> (messages, report); the report is None where nothing was cleared."""
        if not isinstance(self.keep, ThinkingTurns):
            return messages, None
        turns = [index for index, message in enumerate(messages) if any(map(_is_thinking, message.content))]
        old = set(turns[: max(0, len(turns) - self.keep.value)])
        if not old:
            return messages, None
        edited = [
            _with_blocks(message, [block for block in message.content if not _is_thinking(block)])
            if index in old
            else message
            for index, message in enumerate(messages)
        ]
        saved = await count(messages) - await count(edited)
        if saved <= 0:  # the chat template leaves old reasoning out by itself
            return messages, None
        return edited, {"type": self.type, "cleared_thinking_turns": len(old), "cleared_input_tokens": saved}


class OtherEdit(Block):
    """An edit that would do more than shorten the history, such as writing a summary; not applied."""

    type: str = Field(max_length=MAX_NAME)

    async def edit(self, messages: Sequence[Message], count: CountTokens) -> tuple[Sequence[Message], Any]:
        log_once(f"edit {self.type}", "the context edit %s is not known here and not applied", self.type[:80])
        return messages, None


_EDIT_TYPES = frozenset({"clear_tool_uses_20250919", "clear_thinking_20251015"})

Edit = Annotated[
    Annotated[ClearToolUses, Tag("clear_tool_uses_20250919")]
    | Annotated[ClearThinking, Tag("clear_thinking_20251015")]
    | Annotated[OtherEdit, Tag("other")],
    TypeOrOther(_EDIT_TYPES),
]


class ContextManagement(BaseModel):
    """Edits of the history, applied in their order."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    edits: Annotated[list[Edit], at_most(MAX_EDITS)] = Field(default=[], max_length=MAX_EDITS)

    async def edit(
        self, messages: Sequence[Message], count: CountTokens
    ) -> tuple[Sequence[Message], list[dict[str, Any]]]:
        """The shortened messages, and a report of each edit that was applied, as the response has it."""
        applied = []
        for edit in self.edits:
            messages, report = await edit.edit(messages, count)
            if report is not None:
                applied.append(report)
        return messages, applied


def _is_thinking(block: Any) -> bool:
    return isinstance(block, ThinkingBlock)


def _with_blocks(message: Message, blocks: list[Any]) -> Message:
    return message.model_copy(update={"content": blocks})
