"""GET /openapi.json: what this server accepts and returns, made at the first request for it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.generate.served_models import model_of
from tessera.app.http.body import json_response
from tessera.app.http.forwarded import root_path_of
from tessera.app.ollama.errors import OLLAMA
from tessera.app.openapi.document import openapi_document

TIMEOUT = 60.0  # seconds

router = APIRouter(include_in_schema=False)


@router.get("/openapi.json")
async def show_openapi(http_request: Request) -> Response:
    app, model = http_request.app, model_of(http_request)
    async with app.state.openapi_lock:
        if app.openapi_schema is None:  # in a thread: it takes a tenth of a second
            app.openapi_schema = await model.workers.run(
                openapi_document, app.state.api_routes, model.settings, (ANTHROPIC, OLLAMA), timeout=TIMEOUT
            )
    root_path = root_path_of(http_request.scope)
    return json_response({**app.openapi_schema, "servers": [{"url": root_path}]} if root_path else app.openapi_schema)
