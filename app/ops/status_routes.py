"""The page's files under /ui/, and the figures that it polls; the page itself is at /."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from tessera.app.generate.admission import tenant_of
from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import models_of
from tessera.app.http.body import json_response
from tessera.app.ops.page_files import PAGE_PATHS, page_file
from tessera.app.ops.status import status_object
from tessera.app.ops.use import use_object

router = APIRouter(include_in_schema=False)

NOT_STORED = {"cache-control": "no-store"}


@router.get("/ui/{name:path}")  # one route: sixty took 70 ms of each process's start
async def show_file(http_request: Request, name: str) -> Response:
    path = f"/ui/{name}"
    if path not in PAGE_PATHS:
        raise HTTPException(404)
    return page_file(path, http_request.headers.get("if-none-match"))


@router.get("/status.json")
async def show_status(http_request: Request) -> Response:
    state = http_request.app.state
    use = use_object(state.http_counts, state.key_ring, state.key_use, getattr(http_request.state, "holder", None))
    figures = status_object(_model(http_request), models_of(http_request), tenant_of(http_request))
    jobs = await state.fine_tuning_runner.status(tenant_of(http_request))
    response = json_response({**figures, "use": use, "fine_tuning": jobs})
    response.headers.update(NOT_STORED)
    return response


@router.get("/status/history.json")
async def show_history(http_request: Request) -> Response:
    history = http_request.app.state.hour_histories[_model(http_request).engine.index]
    response = json_response(history.as_object())
    response.headers.update(NOT_STORED)
    return response


def _model(http_request: Request) -> ServedModel:
    """The one named `model` in the query, or the first."""
    models = models_of(http_request)
    return models.find(http_request.query_params.get("model", "")) or models.default
