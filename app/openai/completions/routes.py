"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import admit
from tessera.app.generate.completion import complete, num_values
from tessera.app.generate.prompt import (
    MAX_INLINE_IDS,
    PROMPT_TIMEOUT,
    checked_token_ids,
    encode_texts,
    truncated,
)
from tessera.app.generate.served_model import ServedModel
from tessera.app.http.body import built_json
from tessera.app.http.description import Description
from tessera.app.http.streaming import EventStream
from tessera.app.openai.completions.completion import ChoicePrompts, text_completion
from tessera.app.openai.completions.events import CompletionEvents
from tessera.app.openai.completions.logprobs import Echo
from tessera.app.openai.completions.objects import TextCompletionEvent, TextCompletionObject
from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.openai.envelope import ChunkOptions, CompletionHead
from tessera.app.text.detokenizer import token_offsets
from tessera.app.text.tokenizer import Tokenizer

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/completions",
    operation_id="createCompletion",
    summary="Continuations of texts or token ids",
    openapi_extra=Description(CompletionRequest, returns=TextCompletionObject, events=TextCompletionEvent),
)
async def create_completion(http_request: Request) -> Response:
    admission = await admit(http_request, CompletionRequest)
    request, model = admission.request, admission.model
    prompts = await _token_ids(model, request)
    echoes = None
    if request.echo:
        echoes = await _echoes(model, request, prompts)
    generation = await admission.start(
        request,
        prompts,
        param="prompt",
        standalone=[_has_no_text(model.tokenizer, token_ids) for token_ids in prompts],
        text_offsets=[len(echo.text) for echo in echoes] if echoes is not None else None,
    )
    head = CompletionHead.new("cmpl", request.model, model.info)
    shown = _choice_prompts(request, prompts, echoes)
    if request.stream:
        options = ChunkOptions(
            request.include_usage, request.continuous_usage, request.num_logprobs, request.return_tokens_as_token_ids
        )
        events = CompletionEvents(
            head, generation, model.tokenizer, options, echoes=shown.echoes, prompt_token_ids=shown.token_ids
        )
        return EventStream(generation, events, model.settings)
    completions = await complete(http_request, generation, model.settings.request_timeout)

    def whole() -> dict[str, Any]:
        return text_completion(head, request, shown, generation, completions, model.tokenizer)

    return await built_json(num_values(generation, completions), whole)


async def _token_ids(model: ServedModel, request: CompletionRequest) -> list[list[int]]:
    """Of each prompt."""
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    add_special_tokens = True if request.add_special_tokens is None else request.add_special_tokens
    encoded = iter(await encode_texts(model, texts, add_special_tokens=add_special_tokens, param="prompt"))
    return [
        truncated(request, next(encoded) if isinstance(prompt, str) else prompt, model.info)
        for prompt in request.prompt
    ]


async def _echoes(model: ServedModel, request: CompletionRequest, prompts: list[list[int]]) -> list[Echo]:
    def echo_all() -> list[Echo]:
        return [_echo(model, request, *both) for both in zip(request.prompt, prompts, strict=True)]

    if sum(map(len, prompts)) <= MAX_INLINE_IDS:
        return echo_all()
    return await model.workers.run(echo_all, timeout=PROMPT_TIMEOUT)


def _echo(model: ServedModel, request: CompletionRequest, prompt: str | list[int], token_ids: list[int]) -> Echo:
    """A prompt's text as it was sent, unless it came as token ids or was cut."""
    skip_special_tokens = request.skip_special_tokens
    text = prompt if isinstance(prompt, str) and request.truncate_prompt_tokens is None else None
    if text is None:
        checked_token_ids(token_ids, model.info, "prompt")
        text = model.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    offsets: list[int] = []
    if request.num_logprobs is not None:
        detokenizer = model.detokenizers.make(skip_special_tokens=skip_special_tokens, at_start=True)
        offsets = token_offsets(detokenizer, token_ids)
    return Echo(text, token_ids, offsets)


def _choice_prompts(request: CompletionRequest, prompts: list[list[int]], echoes: list[Echo] | None) -> ChoicePrompts:
    """Per choice, of which each prompt has `n`."""
    rows = [row for row in range(len(prompts)) for _ in range(request.num_choices)]
    return ChoicePrompts(
        echoes=[echoes[row] for row in rows] if echoes is not None else None,
        token_ids=[prompts[row] for row in rows] if request.return_token_ids else None,
    )


def _has_no_text(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    """Whether a prompt is only special tokens, so that its completion is the beginning of the text."""
    return all(tokenizer.is_special(token_id) for token_id in token_ids)
