"""POST /v1/responses, and what can be done with the answers that are kept."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.service import service_of, tenant_of
from tessera.app.http.body import read_json_object
from tessera.app.http.json_response import json_response
from tessera.app.http.streaming import EventStream
from tessera.app.openai.responses.conversation import chat_request, messages_of, messages_of_output
from tessera.app.openai.responses.events import ResponseFrames
from tessera.app.openai.responses.input_items import item_page, listed_items
from tessera.app.openai.responses.prompt import response_prompt
from tessera.app.openai.responses.response import ResponseObject
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.openai.responses.store import ResponseStore, StoredResponse
from tessera.app.schema.chat import ChatMessage
from tessera.app.schema.parse import parse_request
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

router = APIRouter()


@router.post("/v1/responses")
async def create_response(http_request: Request) -> Response:
    service = service_of(http_request)
    request = parse_request(ResponsesRequest, await read_json_object(http_request, service.settings))
    request.check()
    service.check_model(request.model)
    tenant = tenant_of(http_request)
    store = store_of(http_request)
    conversation = (*_earlier_messages(store, tenant, request), *messages_of(request.input))
    chat = chat_request(request, conversation)
    chat.check()
    prompt = await response_prompt(service, request, chat)
    generation = service.start_chat(http_request, chat, prompt, param="input")
    stored = request.wants_storing and store.keeps_anything

    def keep(response: dict[str, Any]) -> None:
        if stored:
            messages = (*conversation, *messages_of_output(response["output"]))
            store.put(tenant, StoredResponse(response, messages, listed_items(request.input)))

    frames = ResponseFrames(
        ResponseObject(request, service.defaults, stored=stored),
        generation,
        service.tokenizer,
        num_logprobs=chat.num_logprobs,
        on_finish=keep,
    )
    if request.stream:
        return EventStream(generation, frames, service.settings)
    (answer,) = await service.finish(http_request, generation)
    return json_response(frames.whole(answer))


@router.get("/v1/responses/{response_id}")
async def retrieve_response(http_request: Request, response_id: str) -> Response:
    if http_request.query_params.get("stream", "false") == "true":
        raise InvalidRequestError("stream is not supported here: the answer is returned whole.", param="stream")
    return json_response(_stored(http_request, response_id).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(http_request: Request, response_id: str) -> Response:
    _stored(http_request, response_id)
    store_of(http_request).delete(tenant_of(http_request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(http_request: Request, response_id: str) -> Response:
    return json_response(item_page(_stored(http_request, response_id).input_items, http_request.query_params))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(http_request: Request, response_id: str) -> Response:
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
    """The conversation that `previous_response_id` goes on from."""
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
