"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import tenant_of
from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import models_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.openai.models.anthropic_form import HEADER, model_info, model_page
from tessera.app.openai.models.objects import ModelList, ModelObject

router = APIRouter(tags=["OpenAI"])


@router.get(
    "/v1/models",
    operation_id="listModels",
    summary="The models that are served",
    openapi_extra=Description(returns=ModelList),
)
async def list_models(http_request: Request) -> Response:
    served, tenant = models_of(http_request), tenant_of(http_request)
    models = [model_object(model, name) for model in served for name in served.names_for(tenant, model)]
    if HEADER in http_request.headers:
        return json_response(model_page(models))
    return json_response({"object": "list", "data": models})


@router.get(
    "/v1/models/{name:path}",
    operation_id="retrieveModel",
    summary="One model",
    openapi_extra=Description(returns=ModelObject),
)
async def retrieve_model(http_request: Request, name: PathName) -> Response:
    models = models_of(http_request)
    await models.check_visible(name, tenant_of(http_request))
    model = models.find(name)
    if model is None:
        raise models.unknown(name)
    found = model_object(model, name)
    return json_response(model_info(found) if HEADER in http_request.headers else found)


def _permission(name: str, created: int) -> dict[str, Any]:
    """Permissions for old clients: every key may use every model."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def model_object(model: ServedModel, name: str) -> dict[str, Any]:
    """The fields of OpenAI and vLLM; the longest context once the engine has reported it."""
    info, adapter = model.client.info, (model.client.adapters or {}).get(name)
    created = model.created if adapter is None else adapter.created
    max_model_len = info.max_model_len if info is not None else None
    if info is not None and name in model.settings.embedding_model_names:
        max_model_len = next((found.max_input_tokens for found in info.embeddings if found.role == "beside"), None)
    if info is not None and info.scorer is not None and name in model.settings.reranker_model_names:
        max_model_len = info.scorer.max_input_tokens
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tessera",
        "root": name,
        "parent": model.default_name if name in model.adapter_names else None,
        "permission": [_permission(name, created)],
        "max_model_len": max_model_len,
    }
