"""GET /health and /ping (the engine makes progress), /ready (it takes requests), /load, /version, /metrics.

POST /reset_prefix_cache.
"""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from tessera import __version__
from tessera.app.engines.engines import Engines
from tessera.app.generate.served_models import models_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.keys.api_key import MAX_KEY_NAME, NAME_PATTERN
from tessera.app.keys.key_ring import accounts_of_name
from tessera.app.ops.metrics_page import MetricsPage
from tessera.app.ops.objects import HealthObject, LoadObject, ReadinessObject, ResetObject, VersionObject
from tessera.engine.contract.errors import InvalidRequestError

router = APIRouter(tags=["Operation"])

KEY_PARAMETER = {
    "type": "string",
    "maxLength": MAX_KEY_NAME,
    "pattern": NAME_PATTERN,
    "description": "Name of a key of the keys file, also of a revoked one: forget only what it has computed.",
}
METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@router.get(
    "/health",
    operation_id="health",
    summary="Whether the engine makes progress",
    openapi_extra=Description(returns=HealthObject, statuses={200: "It does.", 503: "It does not."}),
)
async def health(http_request: Request) -> Response:
    return health_response(models_of(http_request).engines)


@router.get(
    "/ping",
    operation_id="ping",
    summary="As /health, for Amazon SageMaker",
    openapi_extra=Description(returns=HealthObject, statuses={200: "It does.", 503: "It does not."}),
)
async def ping(http_request: Request) -> Response:
    return await health(http_request)


@router.get(
    "/load",
    operation_id="load",
    summary="The number of requests that run or wait",
    openapi_extra=Description(returns=LoadObject),
)
async def load(http_request: Request) -> Response:
    histories = (engine.client.history for engine in models_of(http_request).engines)
    latest = [history[-1][1] for history in histories if history]
    return json_response({"server_load": sum(stats.num_running + stats.num_waiting for stats in latest)})


@router.post(
    "/reset_prefix_cache",
    operation_id="resetPrefixCache",
    summary="Forget all cached prompt prefixes, or those of one key",
    openapi_extra=Description(returns=ResetObject, query={"key": KEY_PARAMETER}),
)
async def reset_prefix_cache(http_request: Request) -> Response:
    name = http_request.query_params.get("key")
    if name is not None and not re.fullmatch(NAME_PATTERN, name):
        raise InvalidRequestError(
            f"key must be the name of a key: at most {MAX_KEY_NAME} letters, digits and ._@-", param="key"
        )
    accounts = accounts_of_name(name) if name is not None else None
    for engine in models_of(http_request).engines:
        engine.client.reset_prefix_cache(accounts)
    return json_response({"success": True})


@router.get(
    "/ready",
    operation_id="ready",
    summary="Whether requests are taken",
    openapi_extra=Description(returns=ReadinessObject, statuses={200: "They are.", 503: "They are not."}),
)
async def ready(http_request: Request) -> Response:
    return readiness_response(models_of(http_request).engines, draining=http_request.app.state.draining)


@router.get(
    "/version", operation_id="version", summary="The server's version", openapi_extra=Description(returns=VersionObject)
)
async def show_version() -> Response:
    return json_response({"version": __version__})


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Metrics in Prometheus' text format",
    response_class=PlainTextResponse,
)
async def metrics(http_request: Request) -> Response:
    page: MetricsPage = http_request.app.state.metrics_page
    return Response(await page.text(), media_type=METRICS_MEDIA_TYPE)


def health_response(engines: Engines) -> Response:
    well, reason = engines.health()
    return json_response({"status": "ok" if well else "unavailable", "reason": reason}, 200 if well else 503)


def readiness_response(engines: Engines, *, draining: bool) -> Response:
    is_ready = engines.ready and not draining
    return json_response({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)
