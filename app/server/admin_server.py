"""Health, readiness and metrics on a listener and a thread of their own, whatever the rest of the server does."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tessera import __version__
from tessera.app.engines.engines import Engines
from tessera.app.http.access_log import RequestIdMiddleware
from tessera.app.http.body import json_response
from tessera.app.http.counts import HttpCounts
from tessera.app.http.error_handlers import install_error_handlers
from tessera.app.ops.health import METRICS_MEDIA_TYPE, health_response, readiness_response
from tessera.app.ops.metrics_text import Countable, EngineTexts, render_metrics
from tessera.app.ops.server_process import ServerProcess
from tessera.app.server.http_server import BoundedServer, engines_of
from tessera.app.settings import AppSettings
from tessera.app.sockets.tls import make_context

logger = logging.getLogger("tessera.serve")

MAX_CONNECTIONS = 64
METRICS_PATIENCE = 0.2  # seconds that a busy engine may take; then its last text is shown
METRICS_AGE = 1.0  # seconds for which a text is shown again
HEAD_TIMEOUT = 5.0  # seconds
STOP_TIMEOUT = 5.0  # seconds

router = APIRouter(include_in_schema=False)


@router.get("/health")
@router.get("/ping")
async def health(http_request: Request) -> Response:
    return health_response(http_request.app.state.engines)


@router.get("/ready")
async def ready(http_request: Request) -> Response:
    return readiness_response(http_request.app.state.engines, draining=http_request.app.state.draining)


@router.get("/version")
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/metrics")
async def metrics(http_request: Request) -> Response:
    page: RecentPage = http_request.app.state.metrics_page
    return Response(await page.text(), media_type=METRICS_MEDIA_TYPE)


class RecentPage:
    """The metrics of at most METRICS_AGE ago."""

    def __init__(self, engines: Engines, counts: Sequence[Countable], prefix: str, process: ServerProcess) -> None:
        texts = EngineTexts(engines, METRICS_PATIENCE)
        self._render = partial(render_metrics, engines, counts, prefix, texts, process)
        self._text = b""
        self._rendered_at = float("-inf")
        self._lock = asyncio.Lock()

    async def text(self) -> bytes:
        async with self._lock:
            if time.monotonic() - self._rendered_at >= METRICS_AGE:
                self._text = await self._render()
                self._rendered_at = time.monotonic()
        return self._text


class AdminServer:
    """Runs in a thread, with an event loop and a connection to the engine of its own.

    Args:
        run_dir: with the engine's sockets.
        counts: of the HTTP requests of the server proper, to show.
    """

    def __init__(
        self, run_dir: str, settings: AppSettings, counts: Sequence[Countable], listener: socket.socket
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._counts = counts
        self._listener = listener
        self._app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self._app.include_router(router)
        self._app.state.draining = False
        install_error_handlers(self._app)
        own_counts = HttpCounts(())
        self._app.add_middleware(RequestIdMiddleware, counts=own_counts)
        bounds = AppSettings(model_folder="", served_model_names=(), body_timeout=HEAD_TIMEOUT)
        self._server = BoundedServer(
            self._app,
            bounds,
            own_counts,
            max_connections=MAX_CONNECTIONS,
            drain_timeout=0,
            tls=make_context(settings, asks_clients=False),
        )
        self._thread = threading.Thread(target=self._run, name="admin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def replace_tls(self, context: ssl.SSLContext) -> None:
        """Use these certificates for new connections."""
        self._server.replace_tls(context)

    def begin_drain(self) -> None:
        """Show that the server takes no more requests."""
        self._app.state.draining = True

    def stop(self) -> None:
        """Close the listener and end the thread."""
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("the admin port's thread failed")

    async def _serve(self) -> None:
        engines = engines_of(self._run_dir, self._settings)
        await engines.start()
        self._app.state.engines = engines
        process = ServerProcess(self._settings.app_process)
        self._app.state.metrics_page = RecentPage(engines, self._counts, self._settings.metrics_prefix, process)
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            await engines.close()
