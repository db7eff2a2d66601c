"""POST /api/embed and the older /api/embeddings."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.served_models import model_for, models_of
from tessera.app.http.access_log import trace_of
from tessera.app.http.body import built_json, json_response
from tessera.app.http.description import Description
from tessera.app.ollama.admission import keep_loaded, receive_any
from tessera.app.ollama.lines import nanoseconds
from tessera.app.ollama.names import served_name
from tessera.app.ollama.objects import OllamaEmbeddingObject, OllamaEmbedObject
from tessera.app.ollama.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from tessera.app.openai.embeddings.embedders import Vectors, embeddings_of, num_values
from tessera.app.openai.embeddings.schema import EmbeddingRequest

router = APIRouter(tags=["Ollama"])


@router.post(
    "/api/embed",
    operation_id="ollamaEmbed",
    summary="Embeddings of texts, in Ollama's form",
    openapi_extra=Description(OllamaEmbedRequest, returns=OllamaEmbedObject),
)
async def embed(http_request: Request) -> Response:
    request = await receive_any(http_request, OllamaEmbedRequest)
    name = await _model_name(http_request, request)
    texts = [text for text in request.input if text]
    if not texts:
        return json_response({"model": request.model or name, "embeddings": []})
    chosen = EmbeddingRequest.model_construct(
        model=name, input=request.input, truncate_prompt_tokens=-1 if request.truncate else None
    )
    begun = time.monotonic()
    vectors, num_tokens = await _vectors(http_request, chosen, request.dimensions)
    arrival = trace_of(http_request.scope).arrival
    content = {
        "model": request.model or name,
        "embeddings": list(vectors),
        "total_duration": nanoseconds(time.monotonic() - arrival),
        "load_duration": nanoseconds(begun - arrival),
        "prompt_eval_count": num_tokens,
    }
    return await built_json(num_values(vectors), lambda: content)


@router.post(
    "/api/embeddings",
    operation_id="ollamaEmbeddings",
    summary="The embedding of a text, in Ollama's older form",
    openapi_extra=Description(OllamaEmbeddingsRequest, returns=OllamaEmbeddingObject),
)
async def embed_one(http_request: Request) -> Response:
    request = await receive_any(http_request, OllamaEmbeddingsRequest)
    name = await _model_name(http_request, request)
    if not request.prompt:
        return json_response({"embedding": []})
    chosen = EmbeddingRequest.model_construct(model=name, input=[request.prompt], truncate_prompt_tokens=-1)
    vectors, _ = await _vectors(http_request, chosen, None)
    return await built_json(num_values(vectors), lambda: {"embedding": vectors[0]})


async def _model_name(http_request: Request, request: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> str:
    """The name that the model is served by, once it is loaded."""
    name = served_name(request.model, models_of(http_request).names) if request.model else None
    model = await model_for(http_request, name)
    keep_loaded(http_request, model, request.keep_alive)
    return name if name is not None else embeddings_of(http_request).default_name


async def _vectors(http_request: Request, request: EmbeddingRequest, dimensions: int | None) -> tuple[Vectors, int]:
    """-> (vectors [inputs, dimensions], number of tokens)."""
    embeddings = embeddings_of(http_request)
    model, info = embeddings.find(request.model)
    inputs = await embeddings.token_ids(request, model, info)
    trace = trace_of(http_request.scope)
    trace.model, trace.num_prompt_tokens = request.model, sum(map(len, inputs))
    return await embeddings.embed(http_request, model, info, inputs, dimensions), trace.num_prompt_tokens
