"""The FastAPI application of one app process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from tessera import __version__
from tessera.app.anthropic import routes as messages
from tessera.app.anthropic.errors import ANTHROPIC
from tessera.app.engines.engines import Engines
from tessera.app.generate.sealing import Seal
from tessera.app.generate.served_models import HoldMiddleware, ServedModels
from tessera.app.http.access_log import RequestIdMiddleware, RequestLog
from tessera.app.http.auth import AuthMiddleware, OriginMiddleware
from tessera.app.http.counts import HttpCounts
from tessera.app.http.error_handlers import install_error_handlers
from tessera.app.http.forwarded import ForwardedMiddleware, TrustedProxies
from tessera.app.http.limits import LimitsMiddleware, StartMiddleware
from tessera.app.http.paths import PathMiddleware, check_root_path
from tessera.app.keys.key_ring import KeyRing
from tessera.app.limits.key_metrics import KeyMetrics
from tessera.app.limits.key_use import KeyUse
from tessera.app.limits.lease import RATE_LIMIT_HEADERS
from tessera.app.limits.memory_watermark import MemoryWatermark
from tessera.app.ollama import embed_routes as ollama_embed
from tessera.app.ollama import model_routes as ollama_models
from tessera.app.ollama import routes as ollama
from tessera.app.ollama.errors import OLLAMA
from tessera.app.openai.batches import routes as batches
from tessera.app.openai.batches.batches import Batches
from tessera.app.openai.batches.runner import BatchRunner
from tessera.app.openai.batches.tables import BATCHES_SCHEMA
from tessera.app.openai.chat import routes as chat
from tessera.app.openai.chat import stored_routes as stored_chat
from tessera.app.openai.chat.store import CompletionStore
from tessera.app.openai.completions import routes as completions
from tessera.app.openai.conversations import routes as conversations
from tessera.app.openai.conversations.store import CONVERSATIONS, ConversationStore
from tessera.app.openai.embeddings import routes as embeddings
from tessera.app.openai.embeddings.embedders import Embeddings
from tessera.app.openai.files import routes as files
from tessera.app.openai.files.files import Files
from tessera.app.openai.fine_tuning import routes as fine_tuning
from tessera.app.openai.fine_tuning.jobs import FineTuningJobs
from tessera.app.openai.fine_tuning.results import JobResults
from tessera.app.openai.fine_tuning.runner import JobRunner
from tessera.app.openai.fine_tuning.tables import FINE_TUNING_SCHEMA
from tessera.app.openai.invocations import routes as invocations
from tessera.app.openai.models import adapter_routes as adapters
from tessera.app.openai.models import routes as models
from tessera.app.openai.rerank import routes as rerank
from tessera.app.openai.rerank.scorers import Scorers
from tessera.app.openai.responses import routes as responses
from tessera.app.openai.responses.background import BackgroundJobs
from tessera.app.openai.responses.journal import JobOwner, Journal
from tessera.app.openai.responses.journal_reader import JournalWatch
from tessera.app.openai.responses.store import RESPONSES, ResponseStore
from tessera.app.openai.tokenize import routes as tokenize
from tessera.app.openapi import routes as description
from tessera.app.ops import health
from tessera.app.ops import residence_routes as residence
from tessera.app.ops import root_routes as root
from tessera.app.ops import status_routes as status
from tessera.app.ops.hour_history import HourHistory
from tessera.app.ops.metric_aliases import DerivedGauges
from tessera.app.ops.metrics_page import MetricsPage
from tessera.app.ops.metrics_text import EngineTexts, render_metrics
from tessera.app.ops.page_files import PAGE_PATHS
from tessera.app.ops.server_process import ServerProcess
from tessera.app.server.seal_key import SERVER_KEYS, new_seal_key, stored_seal_key
from tessera.app.settings import AppSettings
from tessera.app.store.schema import Schema
from tessera.app.store.store import Store
from tessera.app.tracing.packages import check_packages

OLLAMA_ROUTES = (ollama, ollama_embed, ollama_models)
ROUTES = (  # a request is compared with each path in this order
    chat,
    completions,
    responses,
    stored_chat,
    conversations,
    messages,
    embeddings,
    rerank,
    invocations,
    models,
    adapters,
    tokenize,
    residence,
    files,
    batches,
    fine_tuning,
    *OLLAMA_ROUTES,
    health,
    root,
    description,
)
SCHEMAS: tuple[Schema, ...] = (
    RESPONSES,
    CONVERSATIONS,
    BATCHES_SCHEMA,
    FINE_TUNING_SCHEMA,
    SERVER_KEYS,
)  # of what rooms store
# Newer versions of FastAPI trace and measure requests themselves, and ask at each of them whether somebody listens.
NO_TELEMETRY: dict[str, Any] = (
    {"telemetry": {"tracing": False, "metrics": False, "logs": False}}
    if "telemetry" in inspect.signature(FastAPI.__init__).parameters
    else {}
)
METRICS_PATIENCE = 4.0  # seconds, below a scrape's usual timeout of 10
PAGE_ROUTES = (status,)  # left out with --no-ui


def create_app(engines: Engines, settings: AppSettings) -> FastAPI:
    """All routes over the engines of `settings.models`. The caller starts and closes `engines`.

    Raises:
        ConfigError: a model's tokenizer, chat template or sampling defaults cannot be used.
    """
    models = ServedModels(engines, settings)
    served = ROUTES + (PAGE_ROUTES if settings.ui else ())
    app = FastAPI(
        title="Tessera",
        version=__version__,
        docs_url=None,  # both load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # app.openapi adds what FastAPI does not see
        redirect_slashes=False,
        lifespan=_lifespan,
        **NO_TELEMETRY,
        routes=[route for routes in served for route in routes.router.routes],  # include_router would build each anew
    )
    state = app.state
    state.models = models
    state.embeddings = {model: Embeddings(model) for model in models}
    state.scorers = {model: Scorers(model, state.embeddings[model]) for model in models}
    state.api_routes = api_routes(served)
    state.openapi_lock = asyncio.Lock()
    state.draining = False
    _add_stores(app, models, settings)
    _add_counts(app, engines, models, settings)
    install_error_handlers(app)
    _add_middleware(app, models, settings)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state = app.state
    models: ServedModels = state.models
    state.watermark.start()
    for model in models:
        if model.template is not None:
            model.template.start()
    state.store.start()
    state.batch_runner.start()
    state.fine_tuning_runner.start()
    state.fine_tuning_results.start()
    for history in state.hour_histories:
        history.start()
    state.seal = Seal(await stored_seal_key(state.store))
    yield
    state.watermark.close()
    for history in state.hour_histories:
        history.close()
    await state.batch_runner.close()
    await state.fine_tuning_runner.close()
    await state.fine_tuning_results.close()
    await state.background.close()
    await state.journal_watch.close()
    await state.store.close()
    if state.tracing is not None:
        await state.tracing.close()
    for model in models:
        model.workers.close()
        if model.template is not None:
            model.template.close()


def _add_stores(app: FastAPI, models: ServedModels, settings: AppSettings) -> None:
    """Stores, and the runners of background responses, batches and fine-tuning jobs."""
    state = app.state
    state.store = Store(Path(settings.data_dir) if settings.data_dir is not None else None, SCHEMAS)
    state.responses = ResponseStore(state.store, settings)
    state.conversations = ConversationStore(state.store, settings)
    state.stored_completions = CompletionStore(state.store, settings)
    journal = Journal(state.responses, JobOwner(state.store))
    state.journal_watch = JournalWatch(journal)
    state.background = BackgroundJobs(journal)
    state.files = Files(state.store, settings)
    state.batches = Batches(state.store, state.files, settings)
    state.batch_runner = BatchRunner(app, models, state.batches)
    state.fine_tuning_jobs = FineTuningJobs(state.store, state.files, settings)
    state.fine_tuning_results = JobResults(state.fine_tuning_jobs, models)
    state.fine_tuning_runner = JobRunner(state.fine_tuning_jobs, state.fine_tuning_results)
    if settings.enable_fine_tuning:
        models.private = state.fine_tuning_results
    state.seal = Seal(new_seal_key())  # until the store has been read


def _add_counts(app: FastAPI, engines: Engines, models: ServedModels, settings: AppSettings) -> None:
    """Counters of requests and keys, the request log and the metrics page."""
    state = app.state
    state.http_counts = HttpCounts(
        [route.path for route in state.api_routes],
        models=models.names,
        fd=settings.count_fd,
        num_rows=settings.num_app_processes,
        row=settings.app_process,
    )
    state.key_use = KeyUse(settings.key_use_fd, settings.num_app_processes, settings.app_process)
    state.key_ring = KeyRing(settings.accepted_keys) if settings.accepted_keys else None
    state.counts = (
        state.http_counts,
        KeyMetrics(state.key_ring, state.key_use),
        DerivedGauges(engines, [model.default_name for model in models]),
        state.fine_tuning_runner,
    )
    state.hour_histories = [HourHistory(model.client) for model in models]
    state.request_log = RequestLog()
    texts = EngineTexts(engines, METRICS_PATIENCE)
    process = ServerProcess(settings.app_process)
    state.metrics_page = MetricsPage(
        partial(render_metrics, engines, state.counts, settings.metrics_prefix, texts, process)
    )


def _add_middleware(app: FastAPI, models: ServedModels, settings: AppSettings) -> None:
    """From the innermost to the outermost."""
    state = app.state
    ring: KeyRing | None = state.key_ring
    state.watermark = MemoryWatermark(settings.min_free_memory * 2**20)
    if not settings.is_static:
        app.add_middleware(HoldMiddleware, models=models)
    app.add_middleware(LimitsMiddleware, use=state.key_use, watermark=state.watermark)
    if ring is not None:
        app.add_middleware(AuthMiddleware, ring=ring, page_paths=PAGE_PATHS if settings.ui else ())
    app.add_middleware(
        OriginMiddleware, allowed_hosts=settings.allowed_hosts or ("*",), cors_origins=settings.cors_origins
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,  # outside of AuthMiddleware: preflight requests carry no key
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after", "traceresponse", *RATE_LIMIT_HEADERS),
        )
    app.add_middleware(
        RequestIdMiddleware, counts=state.http_counts, dialects=(ANTHROPIC, OLLAMA), log=state.request_log
    )
    state.tracing = None
    if settings.otlp_traces_endpoint is not None:
        check_packages()
        from tessera.app.tracing.middleware import TracingMiddleware
        from tessera.app.tracing.tracing import start_tracing

        state.tracing = start_tracing(settings.otlp_traces_endpoint, state.http_counts)
        app.add_middleware(TracingMiddleware, tracing=state.tracing)
    paths = [route.path for route in state.api_routes]
    check_root_path(settings.root_path, paths)
    app.add_middleware(PathMiddleware, routes=paths)
    app.add_middleware(StartMiddleware, ring=ring)
    proxies = TrustedProxies(settings.forwarded_allow_ips)
    if proxies or settings.root_path:
        app.add_middleware(ForwardedMiddleware, proxies=proxies, root_path=settings.root_path)


def api_routes(modules: Sequence[ModuleType]) -> list[APIRoute]:
    return [route for module in modules for route in module.router.routes if isinstance(route, APIRoute)]
