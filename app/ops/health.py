"""GET /health and /ping (the engine makes progress), /ready (it takes requests), /load, /version, /metrics.

POST /reset_prefix_cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from starlette.responses import PlainTextResponse, Response

from tessera import __version__
from tessera.app.generate.served_model import model_of
from tessera.app.http.body import json_response
from tessera.app.http.description import Description
from tessera.app.ops.metric_aliases import with_aliases
from tessera.app.ops.metrics_page import EngineText, MetricsPage
from tessera.app.ops.objects import HealthObject, LoadObject, ReadinessObject, ResetObject, VersionObject
from tessera.engine.ipc.client import EngineClient

router = APIRouter(tags=["Operation"])

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE_PREFIX = re.compile(rb"^((?:# (?:HELP|TYPE) )?)tessera:", re.MULTILINE)


@router.get(
    "/health",
    operation_id="health",
    summary="Whether the engine makes progress",
    openapi_extra=Description(returns=HealthObject, statuses={200: "It does.", 503: "It does not."}),
)
async def health(http_request: Request) -> Response:
    return health_response(model_of(http_request).client)


@router.get(
    "/ping",
    operation_id="ping",
    summary="As /health, for Amazon SageMaker",
    openapi_extra=Description(returns=HealthObject, statuses={200: "It does.", 503: "It does not."}),
)
async def ping(http_request: Request) -> Response:
    return await health(http_request)


@router.get(
    "/load",
    operation_id="load",
    summary="The number of requests that run or wait",
    openapi_extra=Description(returns=LoadObject),
)
async def load(http_request: Request) -> Response:
    history = model_of(http_request).client.history
    stats = history[-1][1] if history else None
    return json_response({"server_load": stats.num_running + stats.num_waiting if stats is not None else 0})


@router.post(
    "/reset_prefix_cache",
    operation_id="resetPrefixCache",
    summary="Forget all cached prompt prefixes",
    openapi_extra=Description(returns=ResetObject),
)
async def reset_prefix_cache(http_request: Request) -> Response:
    model_of(http_request).client.reset_prefix_cache()
    return json_response({"success": True})


@router.get(
    "/ready",
    operation_id="ready",
    summary="Whether requests are taken",
    openapi_extra=Description(returns=ReadinessObject, statuses={200: "They are.", 503: "They are not."}),
)
async def ready(http_request: Request) -> Response:
    return readiness_response(model_of(http_request).client, draining=http_request.app.state.draining)


@router.get(
    "/version", operation_id="version", summary="The server's version", openapi_extra=Description(returns=VersionObject)
)
async def show_version() -> Response:
    return json_response({"version": __version__})


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Metrics in Prometheus' text format",
    response_class=PlainTextResponse,
)
async def metrics(http_request: Request) -> Response:
    page: MetricsPage = http_request.app.state.metrics_page
    return Response(await page.text(), media_type=METRICS_MEDIA_TYPE)


def health_response(client: EngineClient) -> Response:
    well, reason = client.health()
    return json_response({"status": "ok" if well else "unavailable", "reason": reason}, 200 if well else 503)


def readiness_response(client: EngineClient, *, draining: bool) -> Response:
    is_ready = client.ready and not draining
    return json_response({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


class Countable(Protocol):
    """Counts of the app processes."""

    def collect(self, prefix: str) -> Iterator[Metric]: ...


async def render_metrics(
    client: EngineClient, counts: Sequence[Countable], prefix: str, engine_text: EngineText
) -> bytes:
    """The engine's metrics and the app's own, which remain while the engine is down."""
    text = with_aliases(await engine_text.latest(), prefix)
    text = _ENGINE_PREFIX.sub(rb"\g<1>" + prefix.encode() + b":", text)
    return text + generate_latest(_Families(_own_metrics(client, counts, prefix)))


def _own_metrics(client: EngineClient, counts: Sequence[Countable], prefix: str) -> Iterator[Metric]:
    well, _ = client.health()
    yield GaugeMetricFamily(f"{prefix}:engine_up", "Whether the engine gets on with its work.", int(well))
    info = client.info
    if info is not None:
        cache = GaugeMetricFamily(
            f"{prefix}:cache_config_info",
            "The KV cache, as labels; always 1.",
            labels=["block_size", "num_gpu_blocks", "kv_cache_bytes", "cache_dtype"],
        )
        cache.add_metric([str(info.block_size), str(info.num_kv_blocks), str(info.kv_cache_bytes), info.dtype], 1)
        yield cache
    gpu = client.gpu
    if gpu is not None:
        yield GaugeMetricFamily(f"{prefix}:gpu_memory_used_bytes", "Memory of the GPU in use.", gpu.memory_used)
        yield GaugeMetricFamily(f"{prefix}:gpu_memory_total_bytes", "Memory of the GPU.", gpu.memory_total)
        if gpu.utilization is not None:
            documentation = "Share of the last moments in which the GPU ran a kernel, 0 to 1."
            yield GaugeMetricFamily(f"{prefix}:gpu_utilization_perc", documentation, gpu.utilization)
    for each in counts:
        yield from each.collect(prefix)


class _Families(CollectorRegistry):
    """The families of one scrape, for `generate_latest`."""

    def __init__(self, families: Iterator[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families
