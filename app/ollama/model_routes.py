"""GET /api/tags, /api/ps and /api/version, POST /api/show and /api/pull, and the refusals of what changes models."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import tenant_of
from tessera.app.generate.served_models import models_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.ollama.admission import receive_any
from tessera.app.ollama.models import ModelCard, model_cards
from tessera.app.ollama.names import served_name, tagged
from tessera.app.ollama.objects import OllamaModelList, OllamaShowObject, OllamaStatusObject, OllamaVersionObject
from tessera.app.ollama.schema import OllamaPullRequest, OllamaShowRequest
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

router = APIRouter(tags=["Ollama"])

API_VERSION = "0.14.0"  # of Ollama: the first with responses and messages beside its own API; clients look at it

# Paths that would change the models, and their methods.
REFUSED = {
    "/api/create": "POST",
    "/api/copy": "POST",
    "/api/delete": "DELETE",
    "/api/push": "POST",
    "/api/blobs/{digest}": "POST",
}


@router.get(
    "/api/tags",
    operation_id="ollamaTags",
    summary="The models that are served, in Ollama's form",
    openapi_extra=Description(returns=OllamaModelList),
)
async def tags(http_request: Request) -> Response:
    cards = model_cards(models_of(http_request), tenant_of(http_request))
    return json_response({"models": [{**card.listed(), "modified_at": card.modified_at()} for card in cards]})


@router.get(
    "/api/ps",
    operation_id="ollamaPs",
    summary="The models that are loaded",
    openapi_extra=Description(returns=OllamaModelList),
)
async def running(http_request: Request) -> Response:
    return json_response(
        {
            "models": [
                card.running()
                for card in model_cards(models_of(http_request), tenant_of(http_request))
                if card.is_loaded
            ]
        }
    )


@router.post(
    "/api/show",
    operation_id="ollamaShow",
    summary="One model, in Ollama's form",
    openapi_extra=Description(OllamaShowRequest, returns=OllamaShowObject),
)
async def show(http_request: Request) -> Response:
    request = await receive_any(http_request, OllamaShowRequest)
    models = models_of(http_request)
    name = served_name(
        request.model or request.name or models.default.default_name, models.names_for(tenant_of(http_request))
    )
    return json_response(ModelCard(models.find(name) or models.default, name).shown())


@router.get(
    "/api/version",
    operation_id="ollamaVersion",
    summary="The version of Ollama's API",
    openapi_extra=Description(returns=OllamaVersionObject),
)
async def version() -> Response:
    return json_response({"version": API_VERSION})


@router.post(
    "/api/pull",
    operation_id="ollamaPull",
    summary="Nothing to do for a model that is served; others are refused",
    openapi_extra=Description(OllamaPullRequest, returns=OllamaStatusObject),
)
async def pull(http_request: Request) -> Response:
    """Clients pull a model before they use it."""
    request = await receive_any(http_request, OllamaPullRequest)
    models = models_of(http_request)
    try:
        served_name(
            request.model or request.name or models.default.default_name, models.names_for(tenant_of(http_request))
        )
    except NotFoundError:
        return await refuse(http_request)
    return Response(b'{"status":"success"}\n', media_type="application/json")


async def refuse(http_request: Request) -> Response:
    path = http_request.url.path.removeprefix("/api/").partition("/")[0]
    names = ", ".join(tagged(card.name) for card in model_cards(models_of(http_request), tenant_of(http_request)))
    raise InvalidRequestError(
        f"{path} is not supported: the models are chosen when this server is started; it serves {names}",
        code="not_supported",
    )


for path, method in REFUSED.items():
    router.add_api_route(path, refuse, methods=[method], include_in_schema=False)
