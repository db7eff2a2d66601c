"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive
from tessera.app.generate.served_models import model_for
from tessera.app.http.access_log import trace_of
from tessera.app.http.body import built_json
from tessera.app.http.description import Description
from tessera.app.openai.embeddings.embedders import embeddings_of, num_values
from tessera.app.openai.embeddings.objects import EmbeddingList
from tessera.app.openai.embeddings.schema import EmbeddingRequest

if TYPE_CHECKING:
    from tessera.app.openai.embeddings.embedders import Vectors

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/embeddings",
    operation_id="createEmbeddings",
    summary="Embeddings of texts or token ids",
    openapi_extra=Description(EmbeddingRequest, returns=EmbeddingList),
)
async def create_embeddings(http_request: Request) -> Response:
    request = await receive(http_request, EmbeddingRequest)
    await model_for(http_request, request.model)
    embeddings = embeddings_of(http_request)
    name = request.model or embeddings.default_name
    model, info = embeddings.find(name)
    inputs = await embeddings.token_ids(request, model, info)
    trace = trace_of(http_request.scope)
    trace.model, trace.num_prompt_tokens = name, sum(map(len, inputs))
    vectors = await embeddings.embed(http_request, model, info, inputs, request.dimensions)

    def whole() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": embedding}
                for index, embedding in enumerate(_encoded(vectors, request.encoding_format))
            ],
            "model": name,
            "usage": {"prompt_tokens": trace.num_prompt_tokens, "total_tokens": trace.num_prompt_tokens},
        }

    return await built_json(num_values(vectors), whole)


def _encoded(vectors: Vectors, encoding_format: str) -> list[Any]:
    """Each vector as numbers, or as the base64 of its little-endian float32 bytes."""
    if encoding_format == "float":
        return list(vectors)
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
