"""POST /api/chat and /api/generate."""

from __future__ import annotations

import time
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import Admission
from tessera.app.generate.completion import complete
from tessera.app.generate.prompt import render_chat
from tessera.app.http.access_log import trace_of
from tessera.app.http.body import json_response, run_in_turn
from tessera.app.http.description import Description
from tessera.app.http.streaming import EventStream
from tessera.app.ollama.admission import admit_ollama
from tessera.app.ollama.conversation import (
    OllamaChat,
    chat_of,
    chat_prompt,
    generate_chat,
    raw_prompt,
    takes_prompt_as_it_is,
)
from tessera.app.ollama.lines import (
    NDJSON,
    AnswerHead,
    AnswerLines,
    ChatLines,
    GenerateLines,
    Shown,
    load_answer,
    message,
)
from tessera.app.ollama.objects import OllamaChatLine, OllamaChatObject, OllamaGenerateLine, OllamaGenerateObject
from tessera.app.ollama.schema import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest

R = TypeVar("R", bound=OllamaRequest)

router = APIRouter(tags=["Ollama"])


@router.post(
    "/api/chat",
    operation_id="ollamaChat",
    summary="A completion of a conversation, in Ollama's form",
    openapi_extra=Description(OllamaChatRequest, returns=OllamaChatObject, events=OllamaChatLine, event_type=NDJSON),
)
async def chat(http_request: Request) -> Response:
    admission, name = await admit_ollama(http_request, OllamaChatRequest)
    request, model = admission.request, admission.model
    if not request.messages:
        return json_response(load_answer(request.model, unloads=request.keep_alive == 0, message=message(Shown())))
    chat = await run_in_turn(http_request, partial(chat_of, name), request)
    prompt = await render_chat(model, chat)
    head = _head(admission, chat)
    generation = await admission.start_chat(chat, prompt)
    return await _answer(admission, ChatLines(head, generation))


@router.post(
    "/api/generate",
    operation_id="ollamaGenerate",
    summary="A completion of a prompt, in Ollama's form",
    openapi_extra=Description(
        OllamaGenerateRequest, returns=OllamaGenerateObject, events=OllamaGenerateLine, event_type=NDJSON
    ),
)
async def generate(http_request: Request) -> Response:
    admission, name = await admit_ollama(http_request, OllamaGenerateRequest)
    request, model = admission.request, admission.model
    if not request.prompt:
        return json_response(load_answer(request.model, unloads=request.keep_alive == 0, response=""))
    chat = generate_chat(request, name)
    if takes_prompt_as_it_is(request, model):
        token_ids = await raw_prompt(model, request)
        head = _head(admission, chat)
        generation = await admission.start(chat, [token_ids], param="prompt", standalone=[False])
    else:
        prompt = await chat_prompt(model, request, chat)
        token_ids = prompt.token_ids
        head = _head(admission, chat)
        generation = await admission.start_chat(chat, prompt, param="prompt")
    return await _answer(admission, GenerateLines(head, generation, None if request.raw else token_ids))


def _head(admission: Admission[R], chat: OllamaChat) -> AnswerHead:
    """To be made right before the request goes to the engine."""
    arrival = trace_of(admission.http_request.scope).arrival
    name = admission.request.model
    return AnswerHead(name, arrival, time.monotonic(), admission.model.tokenizer, chat.num_logprobs)


async def _answer(admission: Admission[R], lines: AnswerLines) -> Response:
    settings = admission.model.settings
    if admission.request.stream:
        return EventStream(lines.generation, lines, settings, media_type=NDJSON)
    (completion,) = await complete(admission.http_request, lines.generation, settings.request_timeout)
    return json_response(lines.whole(completion))
