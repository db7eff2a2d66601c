"""Stored chat completions: list, read, change their metadata, delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive, tenant_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.openai.chat.objects import (
    DeletedCompletion,
    StoredCompletionList,
    StoredCompletionObject,
    StoredMessageList,
)
from tessera.app.openai.chat.schema import StoredCompletionUpdate
from tessera.app.openai.chat.store import completions_of
from tessera.app.openai.pages import PageParameters, page_of
from tessera.app.schema.fields import MAX_NAME
from tessera.engine.contract.errors import InvalidRequestError

MAX_FILTERS = 16
PAGES = PageParameters(default_order="asc")
LIST_QUERY: Mapping[str, Mapping[str, Any]] = {
    **PAGES.query,
    "model": {"type": "string", "maxLength": MAX_NAME, "description": "Only completions of this model."},
    "metadata[key]": {
        "type": "string",
        "maxLength": 512,
        "description": f"Only completions whose metadata have this value of `key`; up to {MAX_FILTERS} of them.",
    },
}

router = APIRouter(tags=["OpenAI"])


@router.get(
    "/v1/chat/completions",
    operation_id="listChatCompletions",
    summary="Stored chat completions",
    openapi_extra=Description(returns=StoredCompletionList, query=LIST_QUERY),
)
async def list_chat_completions(http_request: Request) -> Response:
    query = http_request.query_params
    page, metadata = PAGES.read(query), _metadata_of(query)
    store, tenant = completions_of(http_request), tenant_of(http_request)
    return json_response(await store.page(tenant, page, query.get("model"), metadata))


@router.get(
    "/v1/chat/completions/{completion_id}",
    operation_id="retrieveChatCompletion",
    summary="A stored chat completion",
    openapi_extra=Description(returns=StoredCompletionObject),
)
async def retrieve_chat_completion(http_request: Request, completion_id: PathName) -> Response:
    return json_response(await completions_of(http_request).find(tenant_of(http_request), completion_id))


@router.get(
    "/v1/chat/completions/{completion_id}/messages",
    operation_id="listChatCompletionMessages",
    summary="The messages of a stored chat completion's request",
    openapi_extra=Description(returns=StoredMessageList, query=PAGES.query),
)
async def list_chat_completion_messages(http_request: Request, completion_id: PathName) -> Response:
    page = PAGES.read(http_request.query_params)
    messages = await completions_of(http_request).messages(tenant_of(http_request), completion_id)
    return json_response(page_of(messages, page, "completion's messages"))


@router.post(
    "/v1/chat/completions/{completion_id}",
    operation_id="updateChatCompletion",
    summary="Replace a stored chat completion's metadata",
    openapi_extra=Description(StoredCompletionUpdate, returns=StoredCompletionObject),
)
async def update_chat_completion(http_request: Request, completion_id: PathName) -> Response:
    request = await receive(http_request, StoredCompletionUpdate)
    store, tenant = completions_of(http_request), tenant_of(http_request)
    return json_response(await store.replace_metadata(tenant, completion_id, request.metadata or {}))


@router.delete(
    "/v1/chat/completions/{completion_id}",
    operation_id="deleteChatCompletion",
    summary="Delete a stored chat completion",
    openapi_extra=Description(returns=DeletedCompletion),
)
async def delete_chat_completion(http_request: Request, completion_id: PathName) -> Response:
    await completions_of(http_request).delete(tenant_of(http_request), completion_id)
    return json_response({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})


def _metadata_of(query: Mapping[str, str]) -> dict[str, str]:
    """The parameters `metadata[key]`. Raises InvalidRequestError for too many."""
    found = {
        name[len("metadata[") : -1]: value
        for name, value in query.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    if len(found) > MAX_FILTERS:
        raise InvalidRequestError(f"metadata may have at most {MAX_FILTERS} keys, not {len(found)}.", param="metadata")
    return found
