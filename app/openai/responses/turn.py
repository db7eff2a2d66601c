"""One turn of a conversation: a request's items, with what is stored of the conversation before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from tessera.app.generate.admission import Admission
from tessera.app.generate.sealing import seal_of
from tessera.app.http.body import run_in_turn
from tessera.app.openai.conversations.item_list import listed_items
from tessera.app.openai.conversations.items import InputItem, ItemReference
from tessera.app.openai.conversations.store import ConversationStore, conversations_of
from tessera.app.openai.conversations.tools import OfferedTools, offered_tools
from tessera.app.openai.responses.conversation import (
    ITEMS,
    ResponsesChat,
    Unseal,
    chat_request,
    configured,
    messages_of,
    messages_of_output,
)
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.openai.responses.store import ResponseStore, StoredResponse, responses_of
from tessera.app.schema.chat import ChatMessage
from tessera.engine.contract.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is to be answered.

    Attributes:
        input_items: the request's items as the API lists them.
        messages: the conversation up to and with them, without instructions.
        tools: those that the model is offered.
        chat: the request as a chat.
    """

    request: ResponsesRequest
    tenant: str
    input_items: tuple[dict[str, Any], ...]
    messages: tuple[ChatMessage, ...]
    tools: OfferedTools
    chat: ResponsesChat
    unseal: Unseal
    responses: ResponseStore
    conversations: ConversationStore

    @property
    def is_stored(self) -> bool:
        return self.request.wants_storing and self.responses.keeps_anything

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        """The response with the conversation that the next turn goes on from."""
        messages = (*self.messages, *messages_of_output(response["output"], self.unseal))
        return StoredResponse(response, messages, self.input_items)

    async def store_response(self, response: dict[str, Any]) -> None:
        """Store a response that is finished, if that was asked for, and add it to its conversation."""
        if self.is_stored:
            await self.responses.store_response(self.tenant, self.stored(response))
        await self.extend_conversation(response)

    async def extend_conversation(self, response: dict[str, Any]) -> None:
        """Append the items of the request and of its response, where there is a conversation to append them to."""
        conversation_id = self.request.conversation
        if conversation_id is not None:
            items = [*self.input_items, *response["output"]]
            await self.conversations.append_if_possible(self.tenant, conversation_id, items)


async def read_turn(http_request: Request, admission: Admission[ResponsesRequest]) -> Turn:
    """Raises RequestError for what the request names and is not stored, and for a conversation without content."""
    request, tenant = admission.request, admission.tenant
    responses, conversations, seal = responses_of(http_request), conversations_of(http_request), seal_of(http_request)

    def unseal(sealed: str) -> str | None:
        return seal.open(sealed, tenant)

    items = list(request.input)
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            items[index] = await _resolved(responses, conversations, tenant, index, item)
    known = await conversations.items(tenant, request.conversation) if request.conversation is not None else []
    earlier = await _earlier_messages(responses, tenant, request)

    def turn_of(items: Sequence[InputItem]) -> Turn:
        every = [*ITEMS.validate_python(known), *items]
        messages = (*earlier, *messages_of(every, unseal))
        if not messages:
            raise InvalidRequestError("input has nothing that the model could read.", param="input")
        in_effect = configured(request, every)
        tools = offered_tools(in_effect.tools or ())
        chat = chat_request(in_effect, tools, messages)
        chat.check()
        return Turn(request, tenant, listed_items(items), messages, tools, chat, unseal, responses, conversations)

    return await run_in_turn(http_request, turn_of, items, num_items=len(known) + len(earlier))


async def _resolved(
    responses: ResponseStore, conversations: ConversationStore, tenant: str, index: int, item: ItemReference
) -> InputItem:
    """The item that a reference names."""
    found = await responses.find_item(tenant, item.id) or await conversations.find_item(tenant, item.id)
    if found is None:
        raise InvalidRequestError(
            f"Item with id {item.id[:100]!r} not found: it may be too long ago, or its response was not stored;"
            " send the item itself.",
            param=f"input[{index}]",
            code="item_not_found",
        )
    (resolved,) = ITEMS.validate_python([found])
    return resolved


async def _earlier_messages(responses: ResponseStore, tenant: str, request: ResponsesRequest) -> Sequence[ChatMessage]:
    """The conversation that `previous_response_id` continues."""
    response_id = request.previous_response_id
    if response_id is None:
        return ()
    if not responses.keeps_anything:
        raise InvalidRequestError(
            "previous_response_id is not supported by this server, which keeps no responses: send the whole input.",
            param="previous_response_id",
        )
    found = await responses.find(tenant, response_id, uses=True)
    if found is None:
        raise InvalidRequestError(
            f"There is no response {response_id[:100]!r} here: it may be too long ago; send the whole input instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.messages
