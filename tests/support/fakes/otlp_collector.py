"""A collector of traces in the test's own process: OTLP over HTTP, protobuf."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

DEADLINE = 20.0  # seconds; only a failing test waits this long


@dataclass(frozen=True)
class Span:
    """A span as it was received; ids in hexadecimal digits, times in nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    """`spans` are in the order of arrival; `headers` are those of the last request."""

    url: str
    spans: list[Span] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def of_trace(self, trace_id: str, num_spans: int) -> list[Span]:
        """The spans of a trace, once there are that many."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.trace_id == trace_id]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= num_spans, DEADLINE), self.spans
            return found()

    def receive(self, body: bytes, headers: dict[str, str]) -> None:
        spans = [
            Span(
                service=_value(next(item for item in group.resource.attributes if item.key == "service.name").value),
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                kind=span.kind,
                start=span.start_time_unix_nano,
                end=span.end_time_unix_nano,
                status=span.status.code,
                attributes={item.key: _value(item.value) for item in span.attributes},
            )
            for group in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self.changed:
            self.spans += spans
            self.headers = headers
            self.changed.notify_all()


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                collector.receive(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind is not None else None
