"""GET /openapi.json: what this server accepts and answers, for people and for programs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.service import service_of
from tessera.app.http.json_response import json_response
from tessera.app.openapi.document import openapi_document

router = APIRouter()


@router.get("/openapi.json")
async def show_openapi(http_request: Request) -> Response:
    return json_response(openapi_document(service_of(http_request).settings))
