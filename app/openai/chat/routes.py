"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.generation import Generation
from tessera.app.generate.service import Answer, Service, service_of
from tessera.app.http.body import read_json_object
from tessera.app.http.json_response import json_response
from tessera.app.http.streaming import EventStream
from tessera.app.openai.events import ChatFrames
from tessera.app.openai.objects import AnswerHead, chat_logprobs, chat_message, usage_object
from tessera.app.openai.prompt_logprobs import prompt_logprobs
from tessera.app.schema.chat import ChatCompletionRequest
from tessera.app.schema.parse import parse_request

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(http_request: Request) -> Response:
    service = service_of(http_request)
    body = await read_json_object(http_request, service.settings)
    request = parse_request(ChatCompletionRequest, body)
    request.check()
    service.check_model(request.model)
    prompt = await service.prepare_chat(request, add_special_tokens=request.add_special_tokens or False)
    prompt = replace(prompt, token_ids=service.truncate(request, prompt.token_ids))
    generation = service.start_chat(http_request, request, prompt)
    head = AnswerHead.new("chatcmpl", request.model, service.info)
    if request.stream:
        frames = ChatFrames(
            head,
            generation,
            service.tokenizer,
            usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            num_logprobs=request.num_logprobs,
            prompt_token_ids=prompt.token_ids if request.return_token_ids else None,
        )
        return EventStream(generation, frames, service.settings)
    answers = await service.finish(http_request, generation)
    return json_response(_completion(service, request, head, generation, answers, prompt.token_ids))


def _completion(
    service: Service,
    request: ChatCompletionRequest,
    head: AnswerHead,
    generation: Generation,
    answers: list[Answer],
    prompt_token_ids: list[int],
) -> dict[str, Any]:
    completion = head.as_dict("chat.completion")
    completion["choices"] = [_choice(service, request, index, answer) for index, answer in enumerate(answers)]
    completion["usage"] = usage_object(generation.usage())
    if request.prompt_logprobs is not None:
        found = generation.prompt_logprobs(0)
        completion["prompt_logprobs"] = prompt_logprobs(found, service.tokenizer, request.prompt_logprobs)
    if request.return_token_ids:
        completion["prompt_token_ids"] = prompt_token_ids
    return completion


def _choice(service: Service, request: ChatCompletionRequest, index: int, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if request.num_logprobs is not None:
        logprobs = chat_logprobs(answer.entries, service.tokenizer, request.num_logprobs)
    choice: dict[str, Any] = {
        "index": index,
        "message": chat_message(answer.text, answer.parts),
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice
