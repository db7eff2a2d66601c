"""POST /tokenize and /detokenize: a text or a conversation as the model's token ids, and back; GET /tokenizer_info."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive
from tessera.app.generate.prompt import checked_token_ids, encode_text, render_chat
from tessera.app.generate.served_model import ServedModel, model_of
from tessera.app.http.body import json_response, read_json_object
from tessera.app.http.description import Description
from tessera.app.openai.tokenize.objects import DetokenizedText, TokenizerInfo, TokenList
from tessera.app.openai.tokenize.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from tessera.app.schema.request import parse_request
from tessera.app.text.tokenizer import load_json

router = APIRouter(tags=["Tokens"])


@router.post(
    "/tokenize",
    operation_id="tokenize",
    summary="The token ids of a text, or of a conversation through the chat template",
    openapi_extra=Description(TokenizeTextRequest, TokenizeChatRequest, returns=TokenList),
)
async def tokenize(http_request: Request) -> Response:
    """`prompt`, or `messages` through the chat template -> token ids."""
    model = model_of(http_request)
    body = await read_json_object(http_request, model.settings)
    if "messages" in body:
        chat = parse_request(TokenizeChatRequest, body)
        chat.check()
        _check_name(model, chat.model)
        token_ids = (await render_chat(model, chat, add_special_tokens=chat.add_special_tokens)).token_ids
        return _token_list(model, token_ids, chat.return_token_strs)
    text = parse_request(TokenizeTextRequest, body)
    _check_name(model, text.model)
    token_ids = await encode_text(model, text.prompt, add_special_tokens=text.add_special_tokens, param="prompt")
    return _token_list(model, token_ids, text.return_token_strs)


@router.post(
    "/detokenize",
    operation_id="detokenize",
    summary="The text of token ids",
    openapi_extra=Description(DetokenizeRequest, returns=DetokenizedText),
)
async def detokenize(http_request: Request) -> Response:
    """Token ids -> text, special tokens included."""
    model = model_of(http_request)
    request = await receive(http_request, DetokenizeRequest)
    _check_name(model, request.model)
    if request.tokens:
        checked_token_ids(request.tokens, model.info, "tokens")
    return json_response({"prompt": model.tokenizer.decode(request.tokens, skip_special_tokens=False)})


@router.get(
    "/tokenizer_info",
    operation_id="tokenizerInfo",
    summary="The model's tokenizer_config.json, with its chat template",
    openapi_extra=Description(returns=TokenizerInfo),
)
async def tokenizer_info(http_request: Request) -> Response:
    model = model_of(http_request)
    config = load_json(Path(model.settings.model_folder) / "tokenizer_config.json")
    template = model.template.sources["default"] if model.template is not None else None
    return json_response({"tokenizer_class": None, **config, "chat_template": template})


def _check_name(model: ServedModel, name: str | None) -> None:
    if name is not None:
        model.check_name(name)


def _token_list(model: ServedModel, token_ids: list[int], with_strings: bool) -> Response:
    strings = [model.tokenizer.token_string(token_id) for token_id in token_ids] if with_strings else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": model.info.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )
