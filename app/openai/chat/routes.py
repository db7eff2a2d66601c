"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import admit
from tessera.app.generate.completion import complete
from tessera.app.generate.prompt import render_chat, truncated
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.http.streaming import EventStream
from tessera.app.openai.chat.completion import chat_completion
from tessera.app.openai.chat.events import ChatEvents
from tessera.app.openai.chat.objects import ChatCompletionEvent, ChatCompletionObject
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.envelope import ChunkOptions, CompletionHead

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    operation_id="createChatCompletion",
    summary="A completion of a conversation",
    openapi_extra=Description(ChatCompletionRequest, returns=ChatCompletionObject, events=ChatCompletionEvent),
)
async def create_chat_completion(http_request: Request) -> Response:
    admission = await admit(http_request, ChatCompletionRequest)
    request, model = admission.request, admission.model
    prompt = await render_chat(model, request, add_special_tokens=request.add_special_tokens or False)
    prompt = replace(prompt, token_ids=truncated(request, prompt.token_ids, model.info))
    generation = admission.start_chat(request, prompt)
    head = CompletionHead.new("chatcmpl", request.model, model.info)
    if request.stream:
        options = ChunkOptions(request.include_usage, request.continuous_usage, request.num_logprobs)
        prompt_token_ids = prompt.token_ids if request.return_token_ids else None
        events = ChatEvents(head, generation, model.tokenizer, options, prompt_token_ids=prompt_token_ids)
        return EventStream(generation, events, model.settings)
    completions = await complete(http_request, generation, model.settings.request_timeout)
    return json_response(chat_completion(head, request, prompt.token_ids, generation, completions, model.tokenizer))
