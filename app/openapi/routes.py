"""GET /openapi.json: what this server accepts and returns, made at the first request for it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.generate.served_model import model_of
from tessera.app.http.body import json_response
from tessera.app.ollama.errors import OLLAMA
from tessera.app.openapi.document import openapi_document

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def show_openapi(http_request: Request) -> Response:
    app = http_request.app
    if app.openapi_schema is None:
        app.openapi_schema = openapi_document(
            app.state.api_routes, model_of(http_request).settings, (ANTHROPIC, OLLAMA)
        )
    return json_response(app.openapi_schema)
