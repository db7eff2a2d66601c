"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.anthropic.conversation import chat_prompt, chat_request
from tessera.app.anthropic.events import MessageEvents
from tessera.app.anthropic.objects import MessageEvent, MessageObject, TokenCount
from tessera.app.anthropic.schema import MessagesPrompt, MessagesRequest
from tessera.app.generate.admission import admit
from tessera.app.generate.completion import complete
from tessera.app.generate.prompt import render_chat
from tessera.app.generate.served_model import ServedModel
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.http.streaming import EventStream
from tessera.engine.contract.errors import InvalidRequestError

router = APIRouter(tags=["Anthropic"])


@router.post(
    "/v1/messages",
    operation_id="createMessage",
    summary="A completion of a conversation, in Anthropic's form",
    openapi_extra=Description(MessagesRequest, returns=MessageObject, events=MessageEvent),
)
async def create_message(http_request: Request) -> Response:
    admission = await admit(http_request, MessagesRequest)
    request, model = admission.request, admission.model
    _check_thinking(model, request)
    chat = chat_request(request)
    chat.check()
    generation = admission.start_chat(chat, await render_chat(model, chat))
    events = MessageEvents(request.model, generation)
    if request.stream:
        return EventStream(generation, events, model.settings)
    (completion,) = await complete(http_request, generation, model.settings.request_timeout)
    return json_response(events.whole(completion))


@router.post(
    "/v1/messages/count_tokens",
    operation_id="countTokens",
    summary="The number of tokens of a conversation",
    openapi_extra=Description(MessagesPrompt, returns=TokenCount),
)
async def count_tokens(http_request: Request) -> Response:
    admission = await admit(http_request, MessagesPrompt)
    _check_thinking(admission.model, admission.request)
    chat = chat_prompt(admission.request)
    chat.check()
    prompt = await render_chat(admission.model, chat)
    return json_response({"input_tokens": len(prompt.token_ids)})


def _check_thinking(model: ServedModel, request: MessagesPrompt) -> None:
    """Refuse a `thinking` that has no effect on this model."""
    if request.thinking is None:
        return
    can_be_switched = model.template is not None and "enable_thinking" in model.template.variables
    wanted = request.thinking.type != "disabled"
    if not can_be_switched and wanted != model.has_reasoning:
        what = "has no reasoning" if wanted else "always reasons"
        raise InvalidRequestError(f"thinking cannot be {request.thinking.type}: this model {what}.", param="thinking")
