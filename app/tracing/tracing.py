"""Tracing of one app process: a tracer, and a bounded queue of spans on their way to the collector."""

from __future__ import annotations

import asyncio
import os
import threading
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from tessera import __version__
from tessera.app.http.counts import HttpCounts
from tessera.app.tracing.span_queue import SpanQueue
from tessera.engine.contract.errors import ConfigError

CLOSE_TIMEOUT = 2.0  # seconds for the last spans; a collector that is away must not hold up the server's end
GRPC_PORT = 4317  # registered for OTLP over gRPC
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP_PATH = "/v1/traces"


class Tracing:
    """The tracer provider of one app process, and the end of its work.

    Sampling, resource attributes, limits and the queue's size are taken from OpenTelemetry's own environment variables.
    Without any, a trace is recorded unless the caller's `traceparent` says that it is not.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str, counts: HttpCounts) -> None:
        self.provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self.provider.add_span_processor(SpanQueue(exporter, endpoint, counts))

    async def close(self) -> None:
        """Send what is queued, for at most CLOSE_TIMEOUT seconds."""
        closing = threading.Thread(target=self.provider.shutdown, name="end of tracing", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_TIMEOUT)


def start_tracing(endpoint: str, counts: HttpCounts) -> Tracing:
    """
    Args:
        endpoint: a URL, see `--otlp-traces-endpoint`.
        counts: of sent and dropped spans.

    Raises:
        ConfigError: OpenTelemetry asks for a protocol that is not supported, or that does not suit the URL.
    """
    return Tracing(make_exporter(endpoint), endpoint, counts)


def make_exporter(endpoint: str) -> SpanExporter:
    """An exporter by gRPC or HTTP, as OpenTelemetry's variables say, else as the URL does. Raises ConfigError."""
    url = urlsplit(endpoint)
    variable = next((name for name in PROTOCOL_VARIABLES if os.environ.get(name)), None)
    wants_grpc = url.scheme.startswith("grpc")
    protocol = os.environ[variable] if variable else "grpc" if wants_grpc or url.port == GRPC_PORT else "http/protobuf"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=url.netloc, insecure=url.scheme in ("grpc", "http"))
    if protocol != "http/protobuf":
        raise ConfigError(f"{variable} is {protocol!r}, but must be grpc or http/protobuf")
    if wants_grpc:
        raise ConfigError(f"--otlp-traces-endpoint {endpoint} is for gRPC, but {variable} is {protocol!r}")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    path = url.path if url.path.strip("/") else HTTP_PATH
    return HttpExporter(endpoint=url._replace(path=path).geturl())


def _resource() -> Resource:
    """This service by OpenTelemetry's variables; its name is `tessera` where they give none."""
    given = OTELResourceDetector().detect().attributes
    own: dict[str, str | int] = {"service.name": "tessera", "service.version": __version__, "process.pid": os.getpid()}
    return Resource.create({name: value for name, value in own.items() if name not in given})
