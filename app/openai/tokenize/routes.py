"""POST /tokenize and /detokenize: a text or a conversation as the model's token ids, and back; GET /tokenizer_info."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import checked_request, receive
from tessera.app.generate.prompt import (
    MAX_INLINE_IDS,
    PROMPT_TIMEOUT,
    checked_token_ids,
    encode_text,
    render_chat,
)
from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import model_for, model_of, models_of
from tessera.app.http.body import json_response, read_json_object, run_in_turn
from tessera.app.http.description import Description
from tessera.app.openai.embeddings.embedders import MAX_INPUT_CHARS, embeddings_of
from tessera.app.openai.rerank.scorers import scorers_of
from tessera.app.openai.tokenize.objects import DetokenizedText, TokenizerInfo, TokenList
from tessera.app.openai.tokenize.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from tessera.app.text.tokenizer import Tokenizer, are_small, load_json
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.messages import EmbeddingInfo, ScorerInfo

router = APIRouter(tags=["Tokens"])


@dataclass(frozen=True)
class Beside:
    """An encoder or a cross-encoder beside the served model."""

    tokenizer: Tokenizer
    info: EmbeddingInfo | ScorerInfo


@router.post(
    "/tokenize",
    operation_id="tokenize",
    summary="The token ids of a text, or of a conversation through the chat template",
    openapi_extra=Description(TokenizeTextRequest, TokenizeChatRequest, returns=TokenList),
)
async def tokenize(http_request: Request) -> Response:
    """`prompt`, or `messages` through the chat template -> token ids."""
    body = await read_json_object(http_request, model_of(http_request).settings)
    if "messages" in body:
        chat = await run_in_turn(http_request, partial(checked_request, TokenizeChatRequest), body)
        model = await _named_model(http_request, chat.model)
        token_ids = (await render_chat(model, chat, add_special_tokens=chat.add_special_tokens)).token_ids
        return _token_list(model.tokenizer, model.info.max_model_len, token_ids, chat.return_token_strs)
    text = await run_in_turn(http_request, partial(checked_request, TokenizeTextRequest), body)
    named = await _named_tokenizer(http_request, text.model)
    if isinstance(named, Beside):
        token_ids = await _encode(http_request, named.tokenizer, text)
        return _token_list(named.tokenizer, named.info.max_input_tokens, token_ids, text.return_token_strs)
    token_ids = await encode_text(named, text.prompt, add_special_tokens=text.add_special_tokens, param="prompt")
    return _token_list(named.tokenizer, named.info.max_model_len, token_ids, text.return_token_strs)


@router.post(
    "/detokenize",
    operation_id="detokenize",
    summary="The text of token ids",
    openapi_extra=Description(DetokenizeRequest, returns=DetokenizedText),
)
async def detokenize(http_request: Request) -> Response:
    """Token ids -> text, special tokens included."""
    request = await receive(http_request, DetokenizeRequest)
    model = await _named_tokenizer(http_request, request.model)
    if len(request.tokens) <= MAX_INLINE_IDS:
        return _text(model, request.tokens)
    return await model_of(http_request).workers.run(_text, model, request.tokens, timeout=PROMPT_TIMEOUT)


@router.get(
    "/tokenizer_info",
    operation_id="tokenizerInfo",
    summary="The model's tokenizer_config.json, with its chat template",
    openapi_extra=Description(returns=TokenizerInfo),
)
async def tokenizer_info(http_request: Request) -> Response:
    models = models_of(http_request)
    model = models.find(http_request.query_params.get("model", "")) or models.default
    config = load_json(Path(model.settings.model_folder) / "tokenizer_config.json")
    template = model.template.sources["default"] if model.template is not None else None
    return json_response({"tokenizer_class": None, **config, "chat_template": template})


async def _named_model(http_request: Request, name: str | None) -> ServedModel:
    """Raises RequestError for a name that is not served to generate."""
    return _checked(await model_for(http_request, name), name)


async def _named_tokenizer(http_request: Request, name: str | None) -> ServedModel | Beside:
    """The same of names of encoders and cross-encoders, too."""
    model = await model_for(http_request, name)
    if name in model.settings.embedding_model_names:
        embedder, info = embeddings_of(http_request).find(name)
        return Beside(embedder.tokenizer, info)
    if name in model.settings.reranker_model_names:
        scorers = scorers_of(http_request)
        return Beside(scorers.tokenizer, scorers.classifier(name))
    return _checked(model, name)


def _checked(model: ServedModel, name: str | None) -> ServedModel:
    if name is not None:
        model.check_name(name)
    return model


async def _encode(http_request: Request, tokenizer: Tokenizer, text: TokenizeTextRequest) -> list[int]:
    """Token ids of a text, which may be longer than the model takes, so that clients can cut it."""
    if len(text.prompt) > MAX_INPUT_CHARS:
        raise InvalidRequestError(f"prompt may have at most {MAX_INPUT_CHARS} characters.", param="prompt")
    encode = partial(tokenizer.encode, text.prompt, add_special_tokens=text.add_special_tokens)
    if are_small([text.prompt]):
        return encode()
    return await model_of(http_request).workers.run(encode, timeout=PROMPT_TIMEOUT)


def _text(model: ServedModel | Beside, token_ids: list[int]) -> Response:
    """Raises InvalidRequestError for ids outside the vocabulary."""
    if token_ids:
        checked_token_ids(token_ids, model.info, "tokens")
    return json_response({"prompt": model.tokenizer.decode(token_ids, skip_special_tokens=False)})


def _token_list(tokenizer: Tokenizer, max_model_len: int, token_ids: list[int], with_strings: bool) -> Response:
    strings = [tokenizer.token_string(token_id) for token_id in token_ids] if with_strings else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )
