"""The FastAPI application of one app process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from app.auth import AuthMiddleware
from app.embeddings import Embeddings
from app.errors import install_error_handlers
from app.http_counts import HttpCounts
from app.middleware import RequestIdMiddleware
from app.objects import VERSION
from app.routes import chat, completions, description, embeddings, health, messages, models, responses, status, tokenize
from app.service import Service
from app.settings import AppSettings
from engine.client import EngineClient

ROUTES = (chat, completions, responses, messages, embeddings, models, tokenize, health, description)
PAGE_ROUTES = (status,)  # for people; left away with --no-ui


def create_app(client: EngineClient, settings: AppSettings) -> FastAPI:
    """All routes over one engine. The caller starts and closes `client`.

    Raises:
        ConfigError: the model's tokenizer, chat template or sampling defaults cannot be used.
    """
    service = Service(client, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.workers.close()

    app = FastAPI(
        title="Tessera",
        version=VERSION,
        docs_url=None,  # both load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # app.routes.description has it: bodies are read by app.body, unknown to FastAPI
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.embeddings = Embeddings(service)
    served = ROUTES + (PAGE_ROUTES if settings.ui else ())
    for routes in served:
        app.include_router(routes.router)
    counts = app.state.http_counts = HttpCounts(
        [route.path for routes in served for route in routes.router.routes if isinstance(route, APIRoute)],
        fd=settings.count_fd,
        num_rows=settings.num_app_processes,
        row=settings.app_process,
    )
    install_error_handlers(app)
    app.add_middleware(AuthMiddleware, api_keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,  # outside of AuthMiddleware: browsers ask beforehand, and without a key
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )
    app.add_middleware(RequestIdMiddleware, counts=counts)  # added last, so it is outermost
    return app
