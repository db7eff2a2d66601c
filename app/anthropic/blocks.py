"""Content blocks of messages and of tool results. What a text model cannot read becomes a text that says so."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from tessera.app.anthropic.tools import OwnTool
from tessera.app.schema.fields import (
    MAX_NAME,
    MAX_PARTS,
    Entries,
    JsonObject,
    Label,
    Off,
    Text,
    TextContent,
    TextPart,
    wrong,
)
from tessera.app.schema.request import log_once

Effort: TypeAlias = Literal["low", "medium", "high", "xhigh", "max"]


class Block(BaseModel):
    """Base of the content blocks. Marks for prompt caching are accepted: prefixes are cached without them."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ImageBlock(Block):
    """A picture, which a text model cannot see."""

    type: Literal["image"]


class OtherBlock(Block):
    """A block of a service that is not here, such as a web search, or of a newer API."""

    type: str = Field(max_length=MAX_NAME)


class TypeOrOther:
    """The tag of a union's member: a value's `type` if it is known, else `other`; none where that is no string.

    The last member is `other`. Descriptions say that it is of none of the known types, so that a value fits one member.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known

    def _tag(self, value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return None if type(kind) is not str else kind if kind in self._known else "other"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return Discriminator(self._tag).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(schema)
        *known, other = described["oneOf"]
        unknown = {"type": {"not": {"enum": sorted(self._known)}}}
        return {**described, "oneOf": [*known, {**other, "properties": unknown}]}


class PlainTextSource(Block):
    type: Literal["text"]
    data: Text


class ContentSource(Block):
    """A document given as text or as blocks, of which those with text are read."""

    type: Literal["content"]
    content: (
        Text
        | Annotated[
            list[
                Annotated[Annotated[TextPart, Tag("text")] | Annotated[OtherBlock, Tag("other")], TypeOrOther({"text"})]
            ],
            Field(max_length=MAX_PARTS),
        ]
    )

    @property
    def data(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text if isinstance(part, TextPart) else left_out(part.type) for part in self.content)


class OtherSource(Block):
    """A PDF or a file, whose text is not known here."""

    type: str = Field(max_length=MAX_NAME)


class DocumentBlock(Block):
    """A document; its plain text is read."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainTextSource, Tag("text")]
        | Annotated[ContentSource, Tag("content")]
        | Annotated[OtherSource, Tag("other")],
        TypeOrOther({"text", "content"}),
    ]
    title: Label | None = None
    context: Text | None = None


class SearchResultBlock(Block):
    """A passage that the client found."""

    type: Literal["search_result"]
    source: Text
    title: Text
    content: TextContent


class ToolReferenceBlock(Block):
    """A tool that a search for tools found; its definition is among the request's tools."""

    type: Literal["tool_reference"]
    tool_name: str = Field(max_length=MAX_NAME)


def _as_blocks(value: Any) -> Any:
    if value is None:
        return []
    if type(value) not in (str, list, tuple):
        raise wrong("must be a string or a list of blocks")
    return [{"type": "text", "text": value}] if type(value) is str else value


_RESULT_TYPES = frozenset({"text", "image", "document", "search_result", "tool_reference"})


ResultBlock = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[OtherBlock, Tag("other")],
    TypeOrOther(_RESULT_TYPES),
]
ResultBlocks = Annotated[Entries[ResultBlock], Field(max_length=MAX_PARTS)]


class ToolUseBlock(Block):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_NAME)
    name: str = Field(max_length=MAX_NAME)
    input: JsonObject


class ToolResultBlock(Block):
    """The result of the call `tool_use_id`."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=MAX_NAME)
    content: Annotated[
        ResultBlocks, BeforeValidator(_as_blocks, json_schema_input_type=Text | ResultBlocks | None)
    ] = []
    is_error: Off = False

    @property
    def text(self) -> str:
        return text_of_blocks(self.content)


class ThinkingBlock(Block):
    """Reasoning of an earlier turn; the signature is needed only where the text was omitted."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Block):
    """Reasoning that only another service can read; left out."""

    type: Literal["redacted_thinking"]


class CompactionBlock(Block):
    """A summary of what stood before it."""

    type: Literal["compaction"]
    content: Text | None = None


class ToolDefinition(Block):
    """A tool as it would stand in the request's `tools`."""

    type: Literal["tool_definition"]
    definition: OwnTool


class KnownTool(Block):
    """A tool of the request, or one that was defined in an earlier block."""

    type: Literal["tool_reference"]
    name: str = Field(max_length=MAX_NAME)


ChangedTool = Annotated[
    Annotated[ToolDefinition, Tag("tool_definition")]
    | Annotated[KnownTool, Tag("tool_reference")]
    | Annotated[OtherBlock, Tag("other")],
    TypeOrOther({"tool_definition", "tool_reference"}),
]


class ToolAdditionBlock(Block):
    """A tool that is offered in addition."""

    type: Literal["tool_addition"]
    tool: ChangedTool


class ToolRemovalBlock(Block):
    """A tool that is offered no more."""

    type: Literal["tool_removal"]
    tool: ChangedTool


_MESSAGE_TYPES = _RESULT_TYPES | {
    *("tool_use", "tool_result", "thinking", "redacted_thinking", "compaction"),
    *("tool_addition", "tool_removal"),
}


ContentBlock = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[ToolAdditionBlock, Tag("tool_addition")]
    | Annotated[ToolRemovalBlock, Tag("tool_removal")]
    | Annotated[OtherBlock, Tag("other")],
    TypeOrOther(_MESSAGE_TYPES),
]
Blocks = Annotated[Entries[ContentBlock], Field(max_length=MAX_PARTS)]


class MessageOutputConfig(BaseModel):
    """The changes that a system message makes to its turn."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    effort: Effort | None = None


class Message(BaseModel):
    """`content` is a string or a list of blocks; that of a system message may be left out."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Blocks,
        Field(default=None, validate_default=True),
        BeforeValidator(_as_blocks, json_schema_input_type=Text | Blocks | None),
    ]
    clear_at: Literal["next_user_message", "never"] | None = Field(
        default=None, description="next_user_message: shown only as long as no message of the user's follows."
    )
    output_config: MessageOutputConfig | None = None


def unreadable(block: ContentBlock) -> str | None:
    """The type of a block that a text model cannot read; None for all others."""
    if isinstance(block, ImageBlock | OtherBlock):
        return block.type
    if isinstance(block, DocumentBlock) and isinstance(block.source, OtherSource):
        return f"document with a source of type '{block.source.type[:40]}'"
    return None


def left_out(what: str) -> str:
    """The text that stands in a prompt for what cannot be read; the log says so once."""
    log_once(f"block {what}", "content of the type %s is left out of prompts: the model reads text only", what[:80])
    article = "An" if what[:1] in tuple("aeiou") else "A"
    return f"[{article} {what[:80]} was left out: this model reads text only.]"


def text_of_blocks(blocks: Iterable[ContentBlock]) -> str:
    """Everything in the blocks that can be read, in lines."""
    texts = map(_text_of, blocks)
    return "\n".join(text for text in texts if text is not None)


def _text_of(block: ContentBlock) -> str | None:
    if isinstance(block, TextPart):
        return block.text
    if isinstance(block, ImageBlock):
        return left_out("image")
    if isinstance(block, DocumentBlock):
        return _document_text(block)
    if isinstance(block, SearchResultBlock):
        content = block.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return f"{block.title}\n{block.source}\n{text}"
    if isinstance(block, ToolReferenceBlock):
        return f"The tool {block.tool_name} can be used now."
    if isinstance(block, CompactionBlock):
        return block.content
    if isinstance(block, OtherBlock):
        log_once(f"block {block.type}", "blocks of the type %s are left out of prompts", block.type[:80])
    return None


def _document_text(block: DocumentBlock) -> str:
    source = block.source
    data = left_out("document") if isinstance(source, OtherSource) else source.data
    return "\n".join(text for text in (block.title, block.context, data) if text)
