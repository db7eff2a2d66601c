"""POST /v1/responses, and reading and deleting stored responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import Admission, admit, tenant_of
from tessera.app.generate.completion import complete
from tessera.app.generate.sealing import seal_of
from tessera.app.generate.served_model import model_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.http.streaming import EventStream, run_while_connected
from tessera.app.openai.responses.background import BackgroundJob, RecordedEvents
from tessera.app.openai.responses.conversation import (
    ITEMS,
    ResponsesChat,
    Unseal,
    chat_request,
    messages_of,
    messages_of_output,
)
from tessera.app.openai.responses.events import ResponseEvents
from tessera.app.openai.responses.input_items import PAGE_QUERY, item_page, listed_items
from tessera.app.openai.responses.items import InputItem, ItemReference
from tessera.app.openai.responses.journal import POLL, Journal, JournalReader
from tessera.app.openai.responses.objects import (
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    ResponseEvent,
    ResponseObject,
)
from tessera.app.openai.responses.prompt import response_prompt
from tessera.app.openai.responses.response import ResponseStates
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.openai.responses.store import ResponseStore, StoredResponse
from tessera.app.schema.chat import ChatMessage
from tessera.app.schema.fields import MAX_INT32
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

NUM_CANCEL_POLLS = 50
STREAM_QUERY = {
    "stream": {"type": "boolean", "default": False, "description": "The events, of a response in the background."},
    "starting_after": {
        "type": "integer",
        "minimum": -1,
        "maximum": MAX_INT32,
        "description": "Only events with a greater number.",
    },
}

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/responses",
    operation_id="createResponse",
    summary="A response to items, stored for the next turn",
    openapi_extra=Description(ResponsesRequest, returns=ResponseObject, events=ResponseEvent),
)
async def create_response(http_request: Request) -> Response:
    admission = await admit(http_request, ResponsesRequest)
    request, model, tenant = admission.request, admission.model, admission.tenant
    store = store_of(http_request)
    turn = _turn(http_request, admission)
    prompt = await response_prompt(model, request, turn.chat)
    generation = admission.start_chat(turn.chat, prompt, param="input")
    stored = request.wants_storing and store.keeps_anything
    states = ResponseStates(request, model.defaults, stored=stored)
    items = listed_items(turn.items)

    def keep(response: dict[str, Any]) -> None:
        if stored:
            messages = (*turn.messages, *messages_of_output(response["output"], turn.unseal))
            store.store_response(tenant, StoredResponse(response, messages, items))

    seal = seal_of(http_request)
    events = ResponseEvents(
        states,
        generation,
        model.tokenizer,
        tools=request.offered_tools.by_name,
        seal=(lambda text: seal.close(text, tenant)) if request.wants_sealed_reasoning else None,
        num_logprobs=turn.chat.num_logprobs,
        on_finish=keep,
    )
    if request.background:
        if not stored:
            raise InvalidRequestError(
                "background is not supported: this server keeps no responses.", param="background"
            )
        await run_while_connected(http_request.receive, generation.wait_accepted(), model.settings.request_timeout)
        keep(states.in_progress())
        journal = Journal(store)
        journal.begin(tenant, states.id)
        job = BackgroundJob(journal, (tenant, states.id), generation, events, keep)
        http_request.app.state.background.start(job, model.settings.request_timeout)
        if request.stream:
            return EventStream(JournalReader(journal, tenant, states.id), RecordedEvents(), model.settings)
        return json_response(states.in_progress())
    if request.stream:
        return EventStream(generation, events, model.settings)
    (completion,) = await complete(http_request, generation, model.settings.request_timeout)
    return json_response(events.whole(completion))


@router.post(
    "/v1/responses/input_tokens",
    operation_id="countInputTokens",
    summary="The number of tokens of a response's prompt",
    openapi_extra=Description(ResponsesRequest, returns=InputTokenCount),
)
async def count_input_tokens(http_request: Request) -> Response:
    admission = await admit(http_request, ResponsesRequest)
    turn = _turn(http_request, admission)
    prompt = await response_prompt(admission.model, admission.request, turn.chat)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact(http_request: Request) -> Response:
    """Not found, rather than a method that a response with this id does not accept."""
    raise NotFoundError("There is no POST /v1/responses/compact here.", code="unknown_url")


@router.get(
    "/v1/responses/{response_id}",
    operation_id="retrieveResponse",
    summary="A stored response",
    openapi_extra=Description(returns=ResponseObject, events=ResponseEvent, query=STREAM_QUERY),
)
async def retrieve_response(http_request: Request, response_id: PathName) -> Response:
    found = _stored(http_request, response_id).response
    query = http_request.query_params
    if query.get("stream", "false") != "true":
        return json_response(found)
    if not found["background"]:
        raise InvalidRequestError("stream is only allowed for responses in the background.", param="stream")
    after = query.get("starting_after", "-1")
    if not (after == "-1" or (after.isascii() and after.isdigit() and len(after) <= 10 and int(after) <= MAX_INT32)):
        raise InvalidRequestError("starting_after must be the sequence_number of an event.", param="starting_after")
    reader = JournalReader(Journal(store_of(http_request)), tenant_of(http_request), response_id, int(after))
    return EventStream(reader, RecordedEvents(), model_of(http_request).settings)


@router.delete(
    "/v1/responses/{response_id}",
    operation_id="deleteResponse",
    summary="Delete a stored response",
    openapi_extra=Description(returns=DeletedResponse),
)
async def delete_response(http_request: Request, response_id: PathName) -> Response:
    _stored(http_request, response_id)
    store_of(http_request).delete(tenant_of(http_request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{response_id}/input_items",
    operation_id="listInputItems",
    summary="The input items of a stored response",
    openapi_extra=Description(returns=InputItemList, query=PAGE_QUERY),
)
async def list_input_items(http_request: Request, response_id: PathName) -> Response:
    return json_response(item_page(_stored(http_request, response_id).input_items, http_request.query_params))


@router.post(
    "/v1/responses/{response_id}/cancel",
    operation_id="cancelResponse",
    summary="End a response in the background",
    openapi_extra=Description(returns=ResponseObject),
)
async def cancel_response(http_request: Request, response_id: PathName) -> Response:
    found = _stored(http_request, response_id).response
    if not found["background"]:
        raise InvalidRequestError("Cannot cancel a synchronous response.", param="response_id")
    journal, tenant = Journal(store_of(http_request)), tenant_of(http_request)
    journal.cancel(tenant, response_id)
    for _ in range(NUM_CANCEL_POLLS):
        if journal.has_ended(tenant, response_id):
            break
        await asyncio.sleep(POLL)
    return json_response(_stored(http_request, response_id).response)


def store_of(request: Request) -> ResponseStore:
    store: Any = request.app.state.response_store
    assert isinstance(store, ResponseStore)
    return store


def _stored(http_request: Request, response_id: str) -> StoredResponse:
    store, tenant = store_of(http_request), tenant_of(http_request)
    found = store.get(tenant, response_id)
    if found is None:
        raise NotFoundError(f"There is no response {response_id[:100]!r} here.", code="response_not_found")
    response = found.response
    if response["status"] == "in_progress" and Journal(store).has_ended(tenant, response_id):
        # Its process died, unless it has just ended.
        found = store.get(tenant, response_id) or found
        if found.response["status"] == "in_progress":
            error = {"code": "server_error", "message": "The server ended while it worked on this response."}
            found = replace(found, response={**response, "status": "failed", "error": error})
    return found


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request's items, references resolved, and the conversation with them."""

    items: Sequence[InputItem]
    messages: Sequence[ChatMessage]
    chat: ResponsesChat
    unseal: Unseal


def _turn(http_request: Request, admission: Admission[ResponsesRequest]) -> _Turn:
    request, tenant, store = admission.request, admission.tenant, store_of(http_request)
    seal = seal_of(http_request)

    def unseal(sealed: str) -> str | None:
        return seal.open(sealed, tenant)

    items = [_resolved(store, tenant, index, item) for index, item in enumerate(request.input)]
    messages = (*_earlier_messages(store, tenant, request), *messages_of(items, unseal))
    if not messages:
        raise InvalidRequestError("input has nothing that the model could read.", param="input")
    chat = chat_request(request, messages)
    chat.check()
    return _Turn(items, messages, chat, unseal)


def _resolved(store: ResponseStore, tenant: str, index: int, item: InputItem) -> InputItem:
    """The item that a reference names; any other item as it is."""
    if not isinstance(item, ItemReference):
        return item
    found = store.find_item(tenant, item.id) if store.keeps_anything else None
    if found is None:
        raise InvalidRequestError(
            f"Item with id {item.id[:100]!r} not found: it may be too long ago, or its response was not stored;"
            " send the item itself.",
            param=f"input[{index}]",
            code="item_not_found",
        )
    (resolved,) = ITEMS.validate_python([found])
    return resolved


def _earlier_messages(store: ResponseStore, tenant: str, request: ResponsesRequest) -> tuple[ChatMessage, ...]:
    """The conversation that `previous_response_id` continues."""
    response_id = request.previous_response_id
    if response_id is None:
        return ()
    if not store.keeps_anything:
        raise InvalidRequestError(
            "previous_response_id is not supported by this server, which keeps no responses: send the whole input.",
            param="previous_response_id",
        )
    found = store.get(tenant, response_id)
    if found is None:
        raise InvalidRequestError(
            f"There is no response {response_id[:100]!r} here: it may be too long ago; send the whole input instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.messages
