"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients call them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.anthropic.conversation import chat_prompt, chat_request
from tessera.app.anthropic.events import MessageFrames
from tessera.app.anthropic.schema import MessagesPrompt, MessagesRequest
from tessera.app.generate.service import Service, service_of
from tessera.app.http.body import read_json_object
from tessera.app.http.json_response import json_response
from tessera.app.http.streaming import EventStream
from tessera.app.schema.parse import parse_request
from tessera.engine.contract.errors import InvalidRequestError

router = APIRouter()


@router.post("/v1/messages")
async def create_message(http_request: Request) -> Response:
    service = service_of(http_request)
    request = parse_request(MessagesRequest, await read_json_object(http_request, service.settings))
    request.check()
    service.check_model(request.model)
    _check_thinking(service, request)
    chat = chat_request(request)
    chat.check()
    prompt = await service.prepare_chat(chat, add_special_tokens=False)
    generation = service.start_chat(http_request, chat, prompt)
    frames = MessageFrames(request.model, generation)
    if request.stream:
        return EventStream(generation, frames, service.settings)
    (answer,) = await service.finish(http_request, generation)
    return json_response(frames.whole(answer))


@router.post("/v1/messages/count_tokens")
async def count_tokens(http_request: Request) -> Response:
    service = service_of(http_request)
    request = parse_request(MessagesPrompt, await read_json_object(http_request, service.settings))
    request.check()
    service.check_model(request.model)
    _check_thinking(service, request)
    chat = chat_prompt(request)
    chat.check()
    prompt = await service.prepare_chat(chat, add_special_tokens=False)
    return json_response({"input_tokens": len(prompt.token_ids)})


def _check_thinking(service: Service, request: MessagesPrompt) -> None:
    """Refuse a wish about thinking that has no effect on this model."""
    if request.thinking is None:
        return
    can_be_switched = service.template is not None and "enable_thinking" in service.template.variables
    wanted = request.thinking.type != "disabled"
    if not can_be_switched and wanted != service.thinks_aloud:
        what = "does not think aloud" if wanted else "always thinks aloud"
        raise InvalidRequestError(f"thinking cannot be {request.thinking.type}: this model {what}.", param="thinking")
