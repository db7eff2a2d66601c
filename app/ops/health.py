"""GET /health (the engine gets on with its work), /ready (it takes requests), /version, /metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from starlette.responses import Response

from tessera import __version__
from tessera.app.generate.service import Service, service_of
from tessera.app.http.counts import HttpCounts
from tessera.app.http.json_response import json_response
from tessera.engine.contract.errors import EngineUnavailableError

router = APIRouter()

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE_PREFIX = re.compile(rb"^((?:# (?:HELP|TYPE) )?)tessera:", re.MULTILINE)


@router.get("/health")
async def health(http_request: Request) -> Response:
    well, reason = service_of(http_request).client.health()
    return json_response({"status": "ok" if well else "unavailable", "reason": reason}, 200 if well else 503)


@router.get("/ready")
async def ready(http_request: Request) -> Response:
    is_ready = service_of(http_request).client.ready
    return json_response({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


@router.get("/version")
async def show_version() -> Response:
    return json_response({"version": __version__})


@router.get("/metrics")
async def metrics(http_request: Request) -> Response:
    """The engine's metrics, and those that need no engine: a stopped one leaves only the latter."""
    service = service_of(http_request)
    prefix = service.settings.metrics_prefix
    try:
        text = await service.client.metrics()
    except EngineUnavailableError:
        text = b""
    text = _ENGINE_PREFIX.sub(rb"\g<1>" + prefix.encode() + b":", text)
    own = _Families(_own_metrics(service, http_request.app.state.http_counts, prefix))
    return Response(text + generate_latest(own), media_type=METRICS_MEDIA_TYPE)


def _own_metrics(service: Service, counts: HttpCounts, prefix: str) -> Iterator[Metric]:
    well, _ = service.client.health()
    yield GaugeMetricFamily(f"{prefix}:engine_up", "Whether the engine gets on with its work.", int(well))
    gpu = service.client.gpu
    if gpu is not None:
        yield GaugeMetricFamily(f"{prefix}:gpu_memory_used_bytes", "Memory of the GPU in use.", gpu.memory_used)
        yield GaugeMetricFamily(f"{prefix}:gpu_memory_total_bytes", "Memory of the GPU.", gpu.memory_total)
        if gpu.utilization is not None:
            documentation = "Share of the last moments in which the GPU ran a kernel, 0 to 1."
            yield GaugeMetricFamily(f"{prefix}:gpu_utilization_perc", documentation, gpu.utilization)
    yield from counts.collect(prefix)


class _Families(CollectorRegistry):
    """What `generate_latest` writes, made anew for each scrape."""

    def __init__(self, families: Iterator[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families
