"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import admit
from tessera.app.generate.completion import Completion, complete, num_values
from tessera.app.generate.prompt import encode_prediction, render_chat, truncated
from tessera.app.http.body import built, built_json
from tessera.app.http.description import Description
from tessera.app.http.streaming import EventStream
from tessera.app.openai.chat.completion import chat_completion, stored_messages
from tessera.app.openai.chat.events import ChatEvents
from tessera.app.openai.chat.objects import ChatCompletionEvent, ChatCompletionObject
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.chat.store import completions_of
from tessera.app.openai.envelope import CompletionHead
from tessera.app.openai.storing import StoringSource

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
    prediction = None
    if request.prediction is not None and model.info.speculates:
        prediction = await encode_prediction(model, request.prediction.content)
    generation = await admission.start_chat(request, prompt, prediction=prediction)
    head = CompletionHead.new("chatcmpl", request.model, model.info)
    completions = [Completion() for _ in generation.choices]

    def whole() -> dict[str, Any]:
        return chat_completion(head, request, prompt.token_ids, generation, completions, model.tokenizer)

    async def store_completion() -> None:
        if request.store:
            response = await built(num_values(generation, completions), whole)
            completion = {**response, "metadata": request.metadata or {}}
            messages = stored_messages(head.id, request.messages)
            await completions_of(http_request).store_completion(admission.tenant, completion, messages)

    if request.stream:
        events = ChatEvents(head, request, prompt.token_ids, generation, model.tokenizer)
        if not request.store:
            return EventStream(generation, events, model.settings)
        return EventStream(StoringSource(generation, store_completion, completions), events, model.settings)
    completions = await complete(http_request, generation, model.settings.request_timeout)
    await store_completion()
    return await built_json(num_values(generation, completions), whole)
