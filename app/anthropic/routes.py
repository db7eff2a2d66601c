"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.anthropic.conversation import prepare_chat
from tessera.app.anthropic.events import MessageEvents
from tessera.app.anthropic.objects import MessageEvent, MessageObject, TokenCount
from tessera.app.anthropic.schema import MessagesPrompt, MessagesRequest
from tessera.app.generate.admission import admit
from tessera.app.generate.completion import complete
from tessera.app.generate.sealing import seal_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.http.streaming import EventStream

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
    seal, tenant = seal_of(http_request), admission.tenant
    prepared = await prepare_chat(http_request, model, request, lambda sealed: seal.open(sealed, tenant))
    generation = await admission.start_chat(prepared.chat, prepared.prompt)
    room = model.info.max_model_len - len(prepared.prompt.token_ids)
    events = MessageEvents(
        request.model,
        generation,
        applied_edits=prepared.applied_edits,
        fills_context=request.max_tokens > room,
        seal=(lambda text: seal.close(text, tenant)) if request.omits_thinking else None,
    )
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
    seal, tenant = seal_of(http_request), admission.tenant
    model, request = admission.model, admission.request
    prepared = await prepare_chat(http_request, model, request, lambda sealed: seal.open(sealed, tenant))
    count: dict[str, Any] = {"input_tokens": len(prepared.prompt.token_ids)}
    if prepared.applied_edits is not None:
        count["context_management"] = {"original_input_tokens": prepared.num_original_tokens}
    return json_response(count)
