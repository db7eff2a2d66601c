"""/v1/batches: create, list, get, cancel."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive, tenant_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.openai.batches.batches import batches_of
from tessera.app.openai.batches.objects import BatchList, BatchObject
from tessera.app.openai.batches.runner import runner_of
from tessera.app.openai.batches.schema import BatchRequest
from tessera.app.openai.pages import PageParameters, list_object

PAGES = PageParameters()

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/batches",
    operation_id="createBatch",
    summary="Run the requests of a file",
    openapi_extra=Description(BatchRequest, returns=BatchObject),
)
async def create_batch(http_request: Request) -> Response:
    request = await receive(http_request, BatchRequest)
    created = await batches_of(http_request).create(tenant_of(http_request), request)
    runner_of(http_request).look_now()
    return json_response(created)


@router.get(
    "/v1/batches",
    operation_id="listBatches",
    summary="The batches of an API key",
    openapi_extra=Description(returns=BatchList, query=PAGES.query),
)
async def list_batches(http_request: Request) -> Response:
    asked = PAGES.read(http_request.query_params)
    data, has_more = await batches_of(http_request).page(tenant_of(http_request), asked)
    return json_response(list_object(data, has_more=has_more))


@router.get(
    "/v1/batches/{batch_id}",
    operation_id="retrieveBatch",
    summary="A batch and how far it is",
    openapi_extra=Description(returns=BatchObject),
)
async def retrieve_batch(http_request: Request, batch_id: PathName) -> Response:
    return json_response(await batches_of(http_request).find(tenant_of(http_request), batch_id))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    operation_id="cancelBatch",
    summary="End a batch; what has run is kept",
    openapi_extra=Description(returns=BatchObject, errors=(409,)),
)
async def cancel_batch(http_request: Request, batch_id: PathName) -> Response:
    cancelled = await batches_of(http_request).cancel(tenant_of(http_request), batch_id)
    runner_of(http_request).look_now()
    return json_response(cancelled)
