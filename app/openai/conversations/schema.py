"""The bodies of /v1/conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tessera.app.openai.conversations.items import InputItem, ItemReference
from tessera.app.schema.fields import Entries, Metadata, at_most
from tessera.app.schema.request import RequestModel
from tessera.engine.contract.errors import InvalidRequestError

MAX_NEW_ITEMS = 20
NewItems = Annotated[Entries[InputItem], Field(max_length=MAX_NEW_ITEMS), at_most(MAX_NEW_ITEMS)]
HELLO_ITEM = {"role": "user", "content": "Hello!"}


def _check_no_references(items: Sequence[InputItem]) -> None:
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            path = f"items[{index}]"
            raise InvalidRequestError(f"{path} is of type 'item_reference': send the item itself.", param=path)


class ConversationRequest(RequestModel):
    """A new conversation, with its first items."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"items": [HELLO_ITEM], "metadata": {"topic": "x"}}}

    items: NewItems | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        _check_no_references(self.items or ())


class ConversationUpdate(RequestModel):
    """Metadata in place of those that a conversation has."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"metadata": {"topic": "y"}}}

    metadata: Metadata | None


class ItemsRequest(RequestModel):
    """Items for the end of a conversation."""

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {"items": [HELLO_ITEM]}}

    items: Annotated[NewItems, Field(min_length=1)]

    def check(self) -> None:
        _check_no_references(self.items)
