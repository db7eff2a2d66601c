"""/v1/fine_tuning/jobs: create, list, get, cancel, pause, resume, events, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from tessera.app.generate.admission import receive, tenant_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description, PathName
from tessera.app.openai.fine_tuning.jobs import jobs_of, result_owner
from tessera.app.openai.fine_tuning.objects import (
    FineTuningJobList,
    FineTuningJobObject,
    JobCheckpointList,
    JobEventList,
)
from tessera.app.openai.fine_tuning.results import results_of
from tessera.app.openai.fine_tuning.runner import runner_of
from tessera.app.openai.fine_tuning.schema import FineTuningRequest
from tessera.app.openai.models.objects import DeletedModel
from tessera.app.openai.pages import PageParameters, list_object
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError

PAGES = PageParameters()
CHECKPOINT_PAGES = PageParameters(default_limit=10)
METADATA_PREFIX = "metadata["
MAX_METADATA = 16

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/fine_tuning/jobs",
    operation_id="createFineTuningJob",
    summary="Train an adapter of a model",
    openapi_extra=Description(FineTuningRequest, returns=FineTuningJobObject, errors=(403,)),
)
async def create_job(http_request: Request) -> Response:
    request = await receive(http_request, FineTuningRequest)
    created = await jobs_of(http_request).create(tenant_of(http_request), result_owner(http_request), request)
    runner_of(http_request).look_now()
    return json_response(created)


@router.get(
    "/v1/fine_tuning/jobs",
    operation_id="listFineTuningJobs",
    summary="The fine-tuning jobs of an API key",
    openapi_extra=Description(returns=FineTuningJobList, query=PAGES.query, errors=(403,)),
)
async def list_jobs(http_request: Request) -> Response:
    jobs, query = jobs_of(http_request), http_request.query_params
    data, has_more = await jobs.page(tenant_of(http_request), PAGES.read(query), _metadata(query))
    return json_response(list_object(data, has_more=has_more))


@router.get(
    "/v1/fine_tuning/jobs/{job_id}",
    operation_id="retrieveFineTuningJob",
    summary="A fine-tuning job and how far it is",
    openapi_extra=Description(returns=FineTuningJobObject, errors=(403,)),
)
async def retrieve_job(http_request: Request, job_id: PathName) -> Response:
    return json_response(await jobs_of(http_request).find(tenant_of(http_request), job_id))


@router.post(
    "/v1/fine_tuning/jobs/{job_id}/cancel",
    operation_id="cancelFineTuningJob",
    summary="End a fine-tuning job; nothing of it is kept",
    openapi_extra=Description(returns=FineTuningJobObject, errors=(403,)),
)
async def cancel_job(http_request: Request, job_id: PathName) -> Response:
    cancelled = await jobs_of(http_request).cancel(tenant_of(http_request), job_id)
    runner_of(http_request).look_now()
    return json_response(cancelled)


@router.post(
    "/v1/fine_tuning/jobs/{job_id}/pause",
    operation_id="pauseFineTuningJob",
    summary="Halt a fine-tuning job",
    openapi_extra=Description(returns=FineTuningJobObject, errors=(403,)),
)
async def pause_job(http_request: Request, job_id: PathName) -> Response:
    paused = await jobs_of(http_request).pause(tenant_of(http_request), job_id)
    runner_of(http_request).look_now()
    return json_response(paused)


@router.post(
    "/v1/fine_tuning/jobs/{job_id}/resume",
    operation_id="resumeFineTuningJob",
    summary="Let a paused fine-tuning job go on",
    openapi_extra=Description(returns=FineTuningJobObject, errors=(403,)),
)
async def resume_job(http_request: Request, job_id: PathName) -> Response:
    resumed = await jobs_of(http_request).resume(tenant_of(http_request), job_id)
    runner_of(http_request).look_now()
    return json_response(resumed)


@router.get(
    "/v1/fine_tuning/jobs/{job_id}/events",
    operation_id="listFineTuningEvents",
    summary="What has happened to a fine-tuning job, and its losses",
    openapi_extra=Description(returns=JobEventList, query=PAGES.query, errors=(403,)),
)
async def list_events(http_request: Request, job_id: PathName) -> Response:
    asked = PAGES.read(http_request.query_params)
    return json_response(await jobs_of(http_request).events(tenant_of(http_request), job_id, asked))


@router.get(
    "/v1/fine_tuning/jobs/{job_id}/checkpoints",
    operation_id="listFineTuningJobCheckpoints",
    summary="The adapters after the last epochs of a fine-tuning job",
    openapi_extra=Description(returns=JobCheckpointList, query=CHECKPOINT_PAGES.query, errors=(403,)),
)
async def list_checkpoints(http_request: Request, job_id: PathName) -> Response:
    asked = CHECKPOINT_PAGES.read(http_request.query_params)
    return json_response(await jobs_of(http_request).checkpoints(tenant_of(http_request), job_id, asked))


@router.delete(
    "/v1/models/{name:path}",
    operation_id="deleteModel",
    summary="Delete a fine-tuned model",
    openapi_extra=Description(returns=DeletedModel, errors=(403,)),
)
async def delete_model(http_request: Request, name: PathName) -> Response:
    """Requests that have begun with it are finished."""
    deleted = await jobs_of(http_request).delete_result(tenant_of(http_request), name)
    if deleted is None:
        raise NotFoundError(f"There is no fine-tuned model {name[:100]!r} to delete.", param="model")
    await results_of(http_request).forget(deleted)
    return json_response({"id": name, "object": "model", "deleted": True})


def _metadata(query: Mapping[str, str]) -> dict[str, str] | None:
    """From `metadata[name]=value`; an empty one for `metadata=null`; None where the query has none."""
    found = {
        name.removeprefix(METADATA_PREFIX).removesuffix("]"): value
        for name, value in query.items()
        if name.startswith(METADATA_PREFIX) and name.endswith("]")
    }
    if len(found) > MAX_METADATA:
        raise InvalidRequestError(f"metadata may have at most {MAX_METADATA} entries.", param="metadata")
    return found or ({} if query.get("metadata") == "null" else None)
