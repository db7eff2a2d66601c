"""POST /v1/responses, and reading and deleting stored responses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import admit, tenant_of
from tessera.app.generate.completion import complete
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.http.streaming import EventStream
from tessera.app.openai.responses.conversation import chat_request, messages_of, messages_of_output
from tessera.app.openai.responses.events import ResponseEvents
from tessera.app.openai.responses.input_items import PAGE_QUERY, item_page, listed_items
from tessera.app.openai.responses.objects import DeletedResponse, InputItemList, ResponseEvent, ResponseObject
from tessera.app.openai.responses.prompt import response_prompt
from tessera.app.openai.responses.response import ResponseStates
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.openai.responses.store import ResponseStore, StoredResponse
from tessera.app.schema.chat import ChatMessage
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

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
    conversation = (*_earlier_messages(store, tenant, request), *messages_of(request.input))
    chat = chat_request(request, conversation)
    chat.check()
    prompt = await response_prompt(model, request, chat)
    generation = admission.start_chat(chat, prompt, param="input")
    stored = request.wants_storing and store.keeps_anything

    def keep(response: dict[str, Any]) -> None:
        if stored:
            messages = (*conversation, *messages_of_output(response["output"]))
            store.store_response(tenant, StoredResponse(response, messages, listed_items(request.input)))

    events = ResponseEvents(
        ResponseStates(request, model.defaults, stored=stored),
        generation,
        model.tokenizer,
        num_logprobs=chat.num_logprobs,
        on_finish=keep,
    )
    if request.stream:
        return EventStream(generation, events, model.settings)
    (completion,) = await complete(http_request, generation, model.settings.request_timeout)
    return json_response(events.whole(completion))


@router.get(
    "/v1/responses/{response_id}",
    operation_id="retrieveResponse",
    summary="A stored response",
    openapi_extra=Description(returns=ResponseObject),
)
async def retrieve_response(http_request: Request, response_id: PathName) -> Response:
    if http_request.query_params.get("stream", "false") == "true":
        raise InvalidRequestError("stream is not supported here: the answer is returned whole.", param="stream")
    return json_response(_stored(http_request, response_id).response)


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
    summary="Always refused: responses in the background, which could be cancelled, are not supported",
    openapi_extra=Description(returns=ResponseObject),
)
async def cancel_response(http_request: Request, response_id: PathName) -> Response:
    _stored(http_request, response_id)
    raise InvalidRequestError("Cannot cancel a synchronous response.", param="response_id")


def store_of(request: Request) -> ResponseStore:
    store: Any = request.app.state.response_store
    assert isinstance(store, ResponseStore)
    return store


def _stored(http_request: Request, response_id: str) -> StoredResponse:
    found = store_of(http_request).get(tenant_of(http_request), response_id)
    if found is None:
        raise NotFoundError(f"There is no response {response_id[:100]!r} here.", code="response_not_found")
    return found


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
