"""POST /sleep and /wake_up, which unload and load a model, and GET /is_sleeping; in the form of vLLM's."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.engines.engines import Engine
from tessera.app.generate.served_models import models_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.ops.objects import SleepingObject
from tessera.app.schema.fields import MAX_NAME
from tessera.engine.contract.errors import InvalidRequestError

router = APIRouter(tags=["Operation"])

QUERY = {
    "model": {"type": "string", "maxLength": MAX_NAME, "description": "The model; all of them where it is left out."}
}
LEVEL = {
    "level": {
        "type": "integer",
        "minimum": 1,
        "maximum": 2,
        "default": 1,
        "description": "1: the weights stay in host memory where --sleep-host-gib has room for them. 2: nothing stays.",
    }
}


@router.post(
    "/sleep",
    operation_id="sleep",
    summary="Take a model off the device; requests get 503 until /wake_up",
    openapi_extra=Description(returns=SleepingObject, query={**QUERY, **LEVEL}),
)
async def sleep(http_request: Request) -> Response:
    """Requests that run are finished first."""
    level = http_request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequestError("level must be 1 or 2.", param="level")
    for engine in _engines(http_request):
        await models_of(http_request).engines.sleep(engine.index, keep=level == "1")
    return _state(http_request)


@router.post(
    "/wake_up",
    operation_id="wakeUp",
    summary="Load a model again",
    openapi_extra=Description(returns=SleepingObject, query=QUERY),
)
async def wake_up(http_request: Request) -> Response:
    """Returns once the model is loaded. Without a name all that sleep are."""
    named = "model" in http_request.query_params
    for engine in _engines(http_request):
        if named or engine.status.state in ("asleep", "failed"):
            await models_of(http_request).engines.wake(engine.index)
    return _state(http_request)


@router.get(
    "/is_sleeping",
    operation_id="isSleeping",
    summary="Whether a model sleeps",
    openapi_extra=Description(returns=SleepingObject, query=QUERY),
)
async def is_sleeping(http_request: Request) -> Response:
    return _state(http_request)


def _engines(http_request: Request) -> list[Engine]:
    """Of the model that is named, or of all. Raises NotFoundError."""
    models = models_of(http_request)
    name = http_request.query_params.get("model")
    if name is None:
        return [model.engine for model in models]
    if len(name) > MAX_NAME:
        raise InvalidRequestError(f"model may have at most {MAX_NAME} characters.", param="model")
    found = models.find(name)
    if found is None:
        raise models.unknown(name)
    return [found.engine]


def _state(http_request: Request) -> Response:
    return json_response({"is_sleeping": all(e.status.state == "asleep" for e in _engines(http_request))})
