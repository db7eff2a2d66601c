"""Traces requests with OpenTelemetry's own ASGI middleware, which reads `traceparent` and writes the request's span."""

from __future__ import annotations

import os
import time

from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.trace import format_span_id, format_trace_id, get_current_span, set_span_in_context
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessera import __version__
from tessera.app.http.access_log import MAX_PATH_LENGTH, QUIET_PATHS, QUIET_PREFIX, trace_of
from tessera.app.tracing.generation_spans import write_spans
from tessera.app.tracing.tracing import Tracing

TRACE_RESPONSE = b"traceresponse"  # of W3C Trace Context, level 2
MAX_HEADER_LENGTH = 512  # the longest tracestate
SHOWN = "tessera.original"  # key of the request's own scope in the one that OpenTelemetry sees


class TracingMiddleware:
    """Wraps RequestIdMiddleware, so that its log line has the trace's id. Paths that are polled are not traced."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracer = tracing.provider.get_tracer("tessera", __version__)
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")  # names of attributes as they are since 2023
        self._traced = OpenTelemetryMiddleware(
            self._run,
            default_span_details=lambda scope: (str(scope["method"]), {}),
            tracer_provider=tracing.provider,
            exclude_spans=["receive", "send"],  # one for each event of a stream
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path in QUIET_PATHS or path.startswith(QUIET_PREFIX):
            await self._app(scope, receive, send)
            return
        # Not the query, which may have secrets, and no bytes that cannot be decoded.
        headers = [(name, value) for name, value in scope["headers"] if _is_decodable(name, value)]
        shown = {**scope, "headers": headers, "query_string": b"", "path": path[:MAX_PATH_LENGTH], SHOWN: scope}
        await self._traced(shown, receive, send)

    async def _run(self, shown: Scope, receive: Receive, send: Send) -> None:
        scope: Scope = shown[SHOWN]
        span = get_current_span()
        context = span.get_span_context()
        trace = trace_of(scope)
        trace.context["trace_id"] = format_trace_id(context.trace_id)
        header = f"00-{trace.context['trace_id']}-{format_span_id(context.span_id)}-{context.trace_flags:02x}".encode()
        begin = time.time_ns()
        end: int | None = None

        async def send_traced(message: Message) -> None:
            nonlocal end
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (TRACE_RESPONSE, header)]}
                if route := getattr(scope.get("route"), "path", None):
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)
            elif not message.get("more_body", False):
                end = time.time_ns()  # before OpenTelemetry ends the request's span
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        finally:
            if span.get_span_context().trace_flags.sampled:
                path = getattr(scope.get("route"), "path", "")
                write_spans(self._tracer, set_span_in_context(span), trace, path, (begin, end or time.time_ns()))


def _is_decodable(name: bytes, value: bytes) -> bool:
    return name.isascii() and value.isascii() and len(value) <= MAX_HEADER_LENGTH
