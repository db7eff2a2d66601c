"""POST /invocations: a chat, a text completion, embeddings or a ranking, by the fields of the body."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.served_models import model_of
from tessera.app.http.body import keep_for_reading, read_json_object
from tessera.app.http.description import Description
from tessera.app.openai.chat.routes import create_chat_completion
from tessera.app.openai.chat.schema import ChatCompletionRequest
from tessera.app.openai.completions.routes import create_completion
from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.openai.embeddings.routes import create_embeddings
from tessera.app.openai.embeddings.schema import EmbeddingRequest
from tessera.app.openai.invocations.objects import InvocationEvent, InvocationObject
from tessera.app.openai.rerank.routes import rerank
from tessera.app.openai.rerank.schema import RerankRequest
from tessera.engine.contract.errors import InvalidRequestError

router = APIRouter(tags=["OpenAI"])

ROUTES = {
    "messages": create_chat_completion,
    "prompt": create_completion,
    "input": create_embeddings,
    "query": rerank,
}


@router.post(
    "/invocations",
    operation_id="invoke",
    summary="A chat with messages, a completion with a prompt, embeddings with an input, or a ranking with a query",
    openapi_extra=Description(
        ChatCompletionRequest,
        CompletionRequest,
        EmbeddingRequest,
        RerankRequest,
        returns=InvocationObject,
        events=InvocationEvent,
    ),
)
async def invoke(http_request: Request) -> Response:
    body = await read_json_object(http_request, model_of(http_request).settings)
    for field, route in ROUTES.items():
        if field in body:
            keep_for_reading(http_request, body)
            return await route(http_request)
    raise InvalidRequestError("The body must have messages, a prompt, an input, or a query with documents.")
