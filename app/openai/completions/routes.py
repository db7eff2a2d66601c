"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.generation import Generation
from tessera.app.generate.service import Answer, Service, service_of
from tessera.app.http.body import read_json_object
from tessera.app.http.json_response import json_response
from tessera.app.http.streaming import EventStream
from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.openai.events import CompletionFrames
from tessera.app.openai.objects import AnswerHead, completion_logprobs, usage_object
from tessera.app.openai.prompt_logprobs import Echo, echo_logprobs, joined_logprobs, prompt_logprobs
from tessera.app.schema.parse import parse_request
from tessera.app.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(http_request: Request) -> Response:
    service = service_of(http_request)
    body = await read_json_object(http_request, service.settings)
    request = parse_request(CompletionRequest, body)
    request.check()
    service.check_model(request.model)
    prompts = [await _token_ids(service, request, prompt) for prompt in request.prompt]
    echoes = None
    if request.echo:
        echoes = [_echo(service, request, *both) for both in zip(request.prompt, prompts, strict=True)]
    generation = service.start(
        http_request,
        request,
        prompts,
        param="prompt",
        standalone=[_has_no_text(service.tokenizer, token_ids) for token_ids in prompts],
        text_offsets=[len(echo.text) for echo in echoes] if echoes is not None else None,
    )
    head = AnswerHead.new("cmpl", request.model, service.info)
    per_choice = [row for row in range(len(prompts)) for _ in range(request.num_choices)]
    echo_of_choice = [echoes[row] for row in per_choice] if echoes is not None else None
    prompt_of_choice = [prompts[row] for row in per_choice] if request.return_token_ids else None
    if request.stream:
        frames = CompletionFrames(
            head,
            generation,
            service.tokenizer,
            usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            num_logprobs=request.num_logprobs,
            echoes=echo_of_choice,
            prompt_token_ids=prompt_of_choice,
        )
        return EventStream(generation, frames, service.settings)
    answers = await service.finish(http_request, generation)
    return json_response(_completion(service, request, head, generation, answers, echo_of_choice, prompt_of_choice))


async def _token_ids(service: Service, request: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        add_special_tokens = True if request.add_special_tokens is None else request.add_special_tokens
        prompt = await service.encode(prompt, add_special_tokens=add_special_tokens, param="prompt")
    return service.truncate(request, prompt)


def _echo(service: Service, request: CompletionRequest, prompt: str | list[int], token_ids: list[int]) -> Echo:
    """A prompt's text as it was sent, unless it came as token ids or was cut."""
    skip_special_tokens = request.skip_special_tokens
    text = prompt if isinstance(prompt, str) and request.truncate_prompt_tokens is None else None
    if text is None:
        service.check_token_ids(token_ids, "prompt")
        text = service.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    offsets: list[int] = []
    if request.num_logprobs is not None:
        offsets = service.token_offsets(token_ids, skip_special_tokens=skip_special_tokens)
    return Echo(text, token_ids, offsets)


def _has_no_text(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    """Whether a prompt is only marks such as the beginning of a text, so that the answer begins the text."""
    return all(tokenizer.is_special(token_id) for token_id in token_ids)


def _completion(
    service: Service,
    request: CompletionRequest,
    head: AnswerHead,
    generation: Generation,
    answers: list[Answer],
    echoes: list[Echo] | None,
    prompts: list[list[int]] | None,
) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(answers):
        logprobs = None
        if request.num_logprobs is not None:
            logprobs = completion_logprobs(answer.entries, service.tokenizer, request.num_logprobs)
        text = answer.text
        if echoes is not None:
            echo = echoes[index]
            text = echo.text + text
            if logprobs is not None and request.num_logprobs is not None:
                scores = generation.prompt_logprobs(index)
                before = echo_logprobs(echo, scores, service.tokenizer, request.num_logprobs)
                logprobs = joined_logprobs(before, logprobs)
        choice: dict[str, Any] = {"text": text, "index": index, "logprobs": logprobs}
        choice["finish_reason"] = answer.finish_reason
        if request.prompt_logprobs is not None:
            found = generation.prompt_logprobs(index)
            choice["prompt_logprobs"] = prompt_logprobs(found, service.tokenizer, request.prompt_logprobs)
        if prompts is not None:
            choice["prompt_token_ids"] = prompts[index]
            choice["token_ids"] = answer.token_ids
        choices.append(choice)
    return {**head.as_dict("text_completion"), "choices": choices, "usage": usage_object(generation.usage())}
