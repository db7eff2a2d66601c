"""The FastAPI application of one app process."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from tessera import __version__
from tessera.app.anthropic import routes as messages
from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.generate.served_model import ServedModel
from tessera.app.http.access_log import RequestIdMiddleware
from tessera.app.http.auth import AcceptedKeys, AuthMiddleware, OriginMiddleware
from tessera.app.http.counts import HttpCounts
from tessera.app.http.error_handlers import install_error_handlers
from tessera.app.http.paths import PathMiddleware
from tessera.app.openai.batches import routes as batches
from tessera.app.openai.batches.batches import Batches
from tessera.app.openai.batches.runner import BatchRunner
from tessera.app.openai.batches.tables import BATCHES_SCHEMA
from tessera.app.openai.chat import routes as chat
from tessera.app.openai.completions import routes as completions
from tessera.app.openai.embeddings import routes as embeddings
from tessera.app.openai.embeddings.embedders import Embeddings
from tessera.app.openai.files import routes as files
from tessera.app.openai.files.files import Files
from tessera.app.openai.invocations import routes as invocations
from tessera.app.openai.models import routes as models
from tessera.app.openai.responses import routes as responses
from tessera.app.openai.responses.background import BackgroundJobs
from tessera.app.openai.responses.sealing import Seal
from tessera.app.openai.responses.store import ResponseStore
from tessera.app.openai.tokenize import routes as tokenize
from tessera.app.openapi import routes as description
from tessera.app.ops import health
from tessera.app.ops import status_routes as status
from tessera.app.ops.metrics_page import MetricsPage
from tessera.app.settings import AppSettings
from tessera.app.store.schema import Schema
from tessera.app.store.store import Store
from tessera.engine.ipc.client import EngineClient

ROUTES = (
    chat,
    completions,
    responses,
    messages,
    embeddings,
    invocations,
    models,
    tokenize,
    files,
    batches,
    health,
    description,
)
SCHEMAS: tuple[Schema, ...] = (BATCHES_SCHEMA,)  # tables of the rooms that store something
PAGE_ROUTES = (status,)  # left out with --no-ui


def create_app(client: EngineClient, settings: AppSettings) -> FastAPI:
    """All routes over one engine. The caller starts and closes `client`.

    Raises:
        ConfigError: the model's tokenizer, chat template or sampling defaults cannot be used.
    """
    model = ServedModel(client, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if model.template is not None:
            model.template.start()
        app.state.store.start()
        app.state.batch_runner.start()
        yield
        await app.state.batch_runner.close()
        await app.state.background.close()
        await app.state.store.close()
        model.workers.close()
        if model.template is not None:
            model.template.close()

    app = FastAPI(
        title="Tessera",
        version=__version__,
        docs_url=None,  # both load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # app.openapi adds what FastAPI does not see
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.model = model
    app.state.store = Store(Path(settings.data_dir) if settings.data_dir is not None else None, SCHEMAS)
    app.state.files = Files(app.state.store, settings)
    app.state.batches = Batches(app.state.store, app.state.files, settings)
    app.state.batch_runner = BatchRunner(app, model, app.state.batches)
    app.state.response_store = ResponseStore(
        settings.max_stored_responses, settings.max_stored_bytes, settings.response_file
    )
    app.state.background = BackgroundJobs()
    app.state.seal = Seal(bytes.fromhex(settings.seal_key) if settings.seal_key else secrets.token_bytes(32))
    app.state.embeddings = Embeddings(model)
    served = ROUTES + (PAGE_ROUTES if settings.ui else ())
    for routes in served:
        app.include_router(routes.router)
    app.state.api_routes = api_routes(served)
    counts = app.state.http_counts = HttpCounts(
        [route.path for route in app.state.api_routes],
        fd=settings.count_fd,
        num_rows=settings.num_app_processes,
        row=settings.app_process,
    )
    app.state.metrics_page = MetricsPage(partial(health.render_metrics, model, counts))
    install_error_handlers(app)
    app.state.accepted_keys = None
    if settings.api_keys:
        app.state.accepted_keys = AcceptedKeys(settings.api_keys)
        app.add_middleware(AuthMiddleware, accepted=app.state.accepted_keys)
    app.add_middleware(
        OriginMiddleware, allowed_hosts=settings.allowed_hosts or ("*",), cors_origins=settings.cors_origins
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,  # outside of AuthMiddleware: preflight requests carry no key
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )
    app.add_middleware(RequestIdMiddleware, counts=counts, dialects=(ANTHROPIC,))
    # Added last, so it is outermost.
    app.add_middleware(PathMiddleware, routes=[route.path for route in app.state.api_routes])
    return app


def api_routes(modules: Sequence[ModuleType]) -> list[APIRoute]:
    return [route for module in modules for route in module.router.routes if isinstance(route, APIRoute)]
