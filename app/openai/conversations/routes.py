"""/v1/conversations: stored items, which responses continue and are added to."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive, tenant_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.openai.conversations.item_list import listed_items
from tessera.app.openai.conversations.objects import (
    ConversationItem,
    ConversationObject,
    DeletedConversation,
    ItemList,
)
from tessera.app.openai.conversations.schema import ConversationRequest, ConversationUpdate, ItemsRequest
from tessera.app.openai.conversations.store import conversations_of
from tessera.app.openai.pages import PageParameters, list_object

PAGES = PageParameters()
router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/conversations",
    operation_id="createConversation",
    summary="A new conversation",
    openapi_extra=Description(ConversationRequest, returns=ConversationObject),
)
async def create_conversation(http_request: Request) -> Response:
    request = await receive(http_request, ConversationRequest)
    store, items = conversations_of(http_request), listed_items(request.items or ())
    return json_response(await store.create(tenant_of(http_request), request.metadata or {}, items))


@router.get(
    "/v1/conversations/{conversation_id}",
    operation_id="retrieveConversation",
    summary="A conversation",
    openapi_extra=Description(returns=ConversationObject),
)
async def retrieve_conversation(http_request: Request, conversation_id: PathName) -> Response:
    return json_response(await conversations_of(http_request).find(tenant_of(http_request), conversation_id))


@router.post(
    "/v1/conversations/{conversation_id}",
    operation_id="updateConversation",
    summary="Replace a conversation's metadata",
    openapi_extra=Description(ConversationUpdate, returns=ConversationObject),
)
async def update_conversation(http_request: Request, conversation_id: PathName) -> Response:
    request = await receive(http_request, ConversationUpdate)
    store, tenant = conversations_of(http_request), tenant_of(http_request)
    return json_response(await store.replace_metadata(tenant, conversation_id, request.metadata or {}))


@router.delete(
    "/v1/conversations/{conversation_id}",
    operation_id="deleteConversation",
    summary="Delete a conversation and its items",
    openapi_extra=Description(returns=DeletedConversation),
)
async def delete_conversation(http_request: Request, conversation_id: PathName) -> Response:
    await conversations_of(http_request).delete(tenant_of(http_request), conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(
    "/v1/conversations/{conversation_id}/items",
    operation_id="createConversationItems",
    summary="Append items to a conversation",
    openapi_extra=Description(ItemsRequest, returns=ItemList),
)
async def create_items(http_request: Request, conversation_id: PathName) -> Response:
    request = await receive(http_request, ItemsRequest)
    store, items = conversations_of(http_request), listed_items(request.items)
    stored = await store.append(tenant_of(http_request), conversation_id, items)
    return json_response(list_object(stored, has_more=False))


@router.get(
    "/v1/conversations/{conversation_id}/items",
    operation_id="listConversationItems",
    summary="The items of a conversation",
    openapi_extra=Description(returns=ItemList, query=PAGES.query),
)
async def list_items(http_request: Request, conversation_id: PathName) -> Response:
    page = PAGES.read(http_request.query_params)
    return json_response(await conversations_of(http_request).item_page(tenant_of(http_request), conversation_id, page))


@router.get(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    operation_id="retrieveConversationItem",
    summary="An item of a conversation",
    openapi_extra=Description(returns=ConversationItem),
)
async def retrieve_item(http_request: Request, conversation_id: PathName, item_id: PathName) -> Response:
    return json_response(await conversations_of(http_request).item(tenant_of(http_request), conversation_id, item_id))


@router.delete(
    "/v1/conversations/{conversation_id}/items/{item_id}",
    operation_id="deleteConversationItem",
    summary="Delete an item of a conversation",
    openapi_extra=Description(returns=ConversationObject),
)
async def delete_item(http_request: Request, conversation_id: PathName, item_id: PathName) -> Response:
    return json_response(
        await conversations_of(http_request).delete_item(tenant_of(http_request), conversation_id, item_id)
    )
