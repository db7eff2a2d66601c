"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.json_response import json_response
from app.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(http_request: Request) -> Response:
    service = service_of(http_request)
    models = [_model(service, name) for name in service.settings.served_model_names]
    return json_response({"object": "list", "data": models})


@router.get("/v1/models/{name:path}")
async def retrieve_model(http_request: Request, name: str) -> Response:
    service = service_of(http_request)
    service.check_model(name)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's four fields, and the longest context once the engine has told it."""
    info = service.client.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tessera",
        "max_model_len": info.max_model_len if info is not None else None,
    }
