"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.service import Service, service_of
from tessera.app.http.json_response import json_response

router = APIRouter()


@router.get("/v1/models")
async def list_models(http_request: Request) -> Response:
    service = service_of(http_request)
    settings = service.settings
    models = [_model(service, name) for name in (*settings.served_model_names, *settings.embedding_model_names)]
    return json_response({"object": "list", "data": models})


@router.get("/v1/models/{name:path}")
async def retrieve_model(http_request: Request, name: str) -> Response:
    service = service_of(http_request)
    if name not in service.settings.embedding_model_names:
        service.check_model(name)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's four fields, and the longest context once the engine has told it."""
    info = service.client.info
    max_model_len = info.max_model_len if info is not None else None
    if info is not None and name in service.settings.embedding_model_names:
        max_model_len = next((found.max_input_tokens for found in info.embeddings if found.role == "beside"), None)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tessera",
        "max_model_len": max_model_len,
    }
