"""POST /v1/rerank, /v1/score and /v1/classify."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive
from tessera.app.generate.served_models import model_for
from tessera.app.http.access_log import trace_of
from tessera.app.http.body import built_json
from tessera.app.http.description import Description
from tessera.app.openai.rerank.objects import ClassificationList, RerankList, ScoreList
from tessera.app.openai.rerank.schema import ClassifyRequest, RerankRequest, ScoreRequest
from tessera.app.openai.rerank.scorers import Pairs, Scored, scorers_of

router = APIRouter(tags=["Scores"])

RESULT_VALUES = 4  # of one document or pair in a response

RERANK = Description(RerankRequest, returns=RerankList)


@router.post("/v1/rerank", operation_id="rerank", summary="Documents by relevance", openapi_extra=RERANK)
@router.post("/v2/rerank", operation_id="rerankCohere", summary="As /v1/rerank", openapi_extra=RERANK)
async def rerank(http_request: Request) -> Response:
    """In the form of Jina's and Cohere's APIs."""
    request = await receive(http_request, RerankRequest)
    await model_for(http_request, request.model)
    scorers = scorers_of(http_request)
    name = request.model or scorers.default_name
    pairs = Pairs([request.query], request.documents, ("query", "documents"))
    scored = await scorers.score_pairs(http_request, name, request, pairs)
    usage = _usage(http_request, name, scored)

    def whole() -> dict[str, Any]:
        order = sorted(range(len(request.documents)), key=lambda index: (-scored.scores[index], index))
        results: list[dict[str, Any]] = []
        for index in order[: request.top_n or None]:
            result: dict[str, Any] = {"index": index, "relevance_score": float(scored.scores[index])}
            if request.return_documents:
                result["document"] = {"text": request.documents[index]}
            results.append(result)
        return {"id": _new_id("rerank"), "model": name, "results": results, "usage": usage}

    return await built_json(RESULT_VALUES * len(request.documents), whole)


@router.post(
    "/v1/score",
    operation_id="score",
    summary="Scores of pairs of texts",
    openapi_extra=Description(ScoreRequest, returns=ScoreList),
)
async def score(http_request: Request) -> Response:
    """In the form of vLLM's API."""
    request = await receive(http_request, ScoreRequest)
    await model_for(http_request, request.model)
    scorers = scorers_of(http_request)
    name, names = request.model or scorers.default_name, request.names
    pairs = Pairs(getattr(request, names[0]), getattr(request, names[1]), names)
    scored = await scorers.score_pairs(http_request, name, request, pairs)

    def data() -> list[dict[str, Any]]:
        return [{"index": index, "object": "score", "score": float(value)} for index, value in enumerate(scored.scores)]

    return await _listed("score", name, data, _usage(http_request, name, scored), RESULT_VALUES * len(scored.scores))


@router.post(
    "/v1/classify",
    operation_id="classify",
    summary="Classes of texts or token ids",
    openapi_extra=Description(ClassifyRequest, returns=ClassificationList),
)
async def classify(http_request: Request) -> Response:
    """In the form of vLLM's API."""
    request = await receive(http_request, ClassifyRequest)
    await model_for(http_request, request.model)
    scorers = scorers_of(http_request)
    name = request.model or scorers.default_name
    scored = await scorers.classify(http_request, name, request)
    labels = scorers.classifier(name).labels

    def data() -> list[dict[str, Any]]:
        return [
            {"index": index, "label": labels[row.argmax()], "probs": row.tolist(), "num_classes": len(labels)}
            for index, row in enumerate(scored.scores)
        ]

    num_values = (RESULT_VALUES + len(labels)) * len(scored.scores)
    return await _listed("classify", name, data, _usage(http_request, name, scored), num_values)


async def _listed(
    kind: str, name: str, data: Callable[[], list[dict[str, Any]]], usage: dict[str, int], num_values: int
) -> Response:
    head = {"id": _new_id(kind), "object": "list", "created": int(time.time()), "model": name}
    return await built_json(num_values, lambda: {**head, "data": data(), "usage": usage})


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def _usage(http_request: Request, name: str, scored: Scored) -> dict[str, int]:
    """Also for the access log."""
    trace = trace_of(http_request.scope)
    trace.model, trace.num_prompt_tokens = name, scored.num_tokens
    return {"prompt_tokens": scored.num_tokens, "total_tokens": scored.num_tokens}
