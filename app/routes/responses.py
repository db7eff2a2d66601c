"""POST /v1/responses, and what can be done with the answers that are kept."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.body import read_json_object
from app.json_response import json_response
from app.protocol.chat import ChatMessage
from app.protocol.parse import parse_request
from app.protocol.responses import ResponsesRequest
from app.responses.answer import ResponseObject
from app.responses.conversation import chat_request, messages_of, messages_of_output
from app.responses.frames import ResponseFrames
from app.responses.input_items import item_page, listed_items
from app.responses.prompt import response_prompt
from app.responses.store import StoredResponse
from app.service import Service, service_of, tenant_of
from app.streaming import EventStream
from engine.errors import InvalidRequestError, NotFoundError

router = APIRouter()


@router.post("/v1/responses")
async def create_response(http_request: Request) -> Response:
    service = service_of(http_request)
    request = parse_request(ResponsesRequest, await read_json_object(http_request, service.settings))
    request.check()
    service.check_model(request.model)
    tenant = tenant_of(http_request)
    conversation = (*_earlier_messages(service, tenant, request), *messages_of(request.input))
    chat = chat_request(request, conversation)
    chat.check()
    prompt = await response_prompt(service, request, chat)
    generation = service.start_chat(http_request, chat, prompt, param="input")
    stored = request.wants_storing and service.responses.keeps_anything

    def keep(response: dict[str, Any]) -> None:
        if stored:
            messages = (*conversation, *messages_of_output(response["output"]))
            service.responses.put(tenant, StoredResponse(response, messages, listed_items(request.input)))

    frames = ResponseFrames(
        ResponseObject(request, service.defaults, stored=stored),
        generation,
        service.tokenizer,
        num_logprobs=chat.num_logprobs,
        on_finish=keep,
    )
    if request.stream:
        return EventStream(generation, frames, service.settings, failure=frames.failure)
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
    service_of(http_request).responses.delete(tenant_of(http_request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(http_request: Request, response_id: str) -> Response:
    return json_response(item_page(_stored(http_request, response_id).input_items, http_request.query_params))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(http_request: Request, response_id: str) -> Response:
    _stored(http_request, response_id)
    raise InvalidRequestError("Cannot cancel a synchronous response.", param="response_id")


def _stored(http_request: Request, response_id: str) -> StoredResponse:
    found = service_of(http_request).responses.get(tenant_of(http_request), response_id)
    if found is None:
        raise NotFoundError(f"There is no response {response_id[:100]!r} here.", code="response_not_found")
    return found


def _earlier_messages(service: Service, tenant: str, request: ResponsesRequest) -> tuple[ChatMessage, ...]:
    """The conversation that `previous_response_id` goes on from."""
    response_id = request.previous_response_id
    if response_id is None:
        return ()
    if not service.responses.keeps_anything:
        raise InvalidRequestError(
            "previous_response_id is not supported by this server, which keeps no responses: send the whole input.",
            param="previous_response_id",
        )
    found = service.responses.get(tenant, response_id)
    if found is None:
        raise InvalidRequestError(
            f"There is no response {response_id[:100]!r} here: it may be too long ago; send the whole input instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found.messages
