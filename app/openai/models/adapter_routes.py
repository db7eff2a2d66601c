"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive
from tessera.app.generate.served_models import model_for, models_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.openai.models.objects import DeletedModel, ModelObject
from tessera.app.openai.models.routes import model_object
from tessera.app.openai.models.schema import LoadAdapterRequest, UnloadAdapterRequest
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

router = APIRouter(tags=["Operation"])


@router.post(
    "/v1/load_lora_adapter",
    operation_id="loadLoraAdapter",
    summary="Serve a LoRA adapter from a folder of the server's machine; needs --allow-lora-loading",
    openapi_extra=Description(LoadAdapterRequest, returns=ModelObject),
)
async def load_lora_adapter(http_request: Request) -> Response:
    """Returns once requests may name the adapter as their model."""
    request = await receive(http_request, LoadAdapterRequest)
    models, name = models_of(http_request), request.lora_name
    if request.base_model_name is not None and models.find(request.base_model_name) is None:
        raise models.unknown(request.base_model_name)
    owner = models.find(name)
    if owner is not None and name not in owner.adapter_names:
        raise InvalidRequestError(f"A model is called {name[:100]!r} already.", param="lora_name")
    model = await model_for(http_request, request.base_model_name)
    if owner is not None and owner is not model:
        raise InvalidRequestError(f"Another model has an adapter {name[:100]!r} already.", param="lora_name")
    await model.client.load_adapter(name, request.lora_path, replace=request.load_inplace)
    return json_response(model_object(model, name))


@router.post(
    "/v1/unload_lora_adapter",
    operation_id="unloadLoraAdapter",
    summary="Serve a LoRA adapter no more; needs --allow-lora-loading",
    openapi_extra=Description(UnloadAdapterRequest, returns=DeletedModel),
)
async def unload_lora_adapter(http_request: Request) -> Response:
    """Requests that have begun with the adapter are finished with it."""
    request = await receive(http_request, UnloadAdapterRequest)
    name = request.lora_name
    owner = models_of(http_request).find(name)
    if owner is None or name not in owner.adapter_names:
        raise NotFoundError(f"There is no adapter {name[:100]!r}.", param="lora_name")
    model = await model_for(http_request, name)
    await model.client.unload_adapter(name)
    return json_response({"id": name, "object": "model", "deleted": True})
