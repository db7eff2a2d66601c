"""POST /tokenize and /detokenize: what the model sees of a text or a conversation, and back."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.service import Service, service_of
from tessera.app.http.body import read_json_object
from tessera.app.http.json_response import json_response
from tessera.app.openai.tokenize.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from tessera.app.schema.parse import parse_request

router = APIRouter()


@router.post("/tokenize")
async def tokenize(http_request: Request) -> Response:
    """`prompt`, or `messages` through the chat template -> token ids."""
    service = service_of(http_request)
    body = await read_json_object(http_request, service.settings)
    if "messages" in body:
        chat = parse_request(TokenizeChatRequest, body)
        chat.check_conversation()
        _check_model(service, chat.model)
        token_ids = await service.encode_chat(chat, add_special_tokens=chat.add_special_tokens)
        return _token_list(service, token_ids, chat.return_token_strs)
    text = parse_request(TokenizeTextRequest, body)
    _check_model(service, text.model)
    token_ids = await service.encode(text.prompt, add_special_tokens=text.add_special_tokens, param="prompt")
    return _token_list(service, token_ids, text.return_token_strs)


@router.post("/detokenize")
async def detokenize(http_request: Request) -> Response:
    """Token ids -> text, special tokens included."""
    service = service_of(http_request)
    request = parse_request(DetokenizeRequest, await read_json_object(http_request, service.settings))
    _check_model(service, request.model)
    if request.tokens:
        service.check_token_ids(request.tokens, "tokens")
    return json_response({"prompt": service.tokenizer.decode(request.tokens, skip_special_tokens=False)})


def _check_model(service: Service, name: str | None) -> None:
    if name is not None:
        service.check_model(name)


def _token_list(service: Service, token_ids: list[int], with_strings: bool) -> Response:
    strings = [service.tokenizer.token_string(token_id) for token_id in token_ids] if with_strings else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": service.info.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )
