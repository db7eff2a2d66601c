"""GET /health (the engine gets on with its work), /ready (it takes requests), /version, /metrics."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.json_response import json_response
from app.objects import VERSION
from app.service import service_of
from engine.errors import EngineUnavailableError

router = APIRouter()

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE_PREFIX = re.compile(rb"^((?:# (?:HELP|TYPE) )?)tessera:", re.MULTILINE)


@router.get("/health")
async def health(http_request: Request) -> Response:
    well, reason = service_of(http_request).client.health()
    return json_response({"status": "ok" if well else "unavailable", "reason": reason}, 200 if well else 503)


@router.get("/ready")
async def ready(http_request: Request) -> Response:
    is_ready = service_of(http_request).client.ready
    return json_response({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


@router.get("/version")
async def show_version() -> Response:
    return json_response({"version": VERSION})


@router.get("/metrics")
async def metrics(http_request: Request) -> Response:
    """The engine's metrics and whether it is up; a stopped engine leaves only the latter."""
    service = service_of(http_request)
    prefix = service.settings.metrics_prefix.encode()
    try:
        text = await service.client.metrics()
    except EngineUnavailableError:
        text = b""
    well, _ = service.client.health()
    text = _ENGINE_PREFIX.sub(rb"\g<1>" + prefix + b":", text)
    up = (
        b"# HELP %b:engine_up Whether the engine gets on with its work.\n"
        b"# TYPE %b:engine_up gauge\n"
        b"%b:engine_up %d\n" % (prefix, prefix, prefix, well)
    )
    return Response(text + up, media_type=METRICS_MEDIA_TYPE)
