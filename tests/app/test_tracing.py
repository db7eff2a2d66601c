"""The spans of requests, and collectors that are slow or away, which cost their spans alone."""

from __future__ import annotations

import builtins
import re
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tessera.app.http.counts import HttpCounts
from tessera.app.tracing import packages, tracing
from tessera.app.tracing.generation_spans import operation_of
from tessera.app.tracing.span_queue import SpanQueue
from tessera.app.tracing.tracing import make_exporter
from tessera.engine.contract.environment import environment_without_secrets
from tessera.engine.contract.errors import ConfigError
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.fakes.otlp_collector import Collector, Span, collecting
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0.5, "n": 2}
ERROR = 2  # status of a span


def hello() -> FakeClient:
    outputs = play(ids("hello you"), finish="length", num_cached_tokens=3)
    outputs[0] = msgspec.structs.replace(outputs[0], queue_time=0.0, prefill_time=0.0)
    outputs[-1] = msgspec.structs.replace(outputs[-1], decode_time=0.0)
    return FakeClient(always(outputs))


def traced(collector: Collector, folder: Path, path: str, **options: Any) -> httpx.Response:
    """One request to a server that sends its traces to this collector."""
    settings = settings_for(write_model_folder(folder), otlp_traces_endpoint=collector.url)
    with serve(hello(), settings) as url:
        return httpx.post(url + path, timeout=20, **options)


def test_a_request_becomes_spans_with_the_names_of_the_conventions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=mine")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-tessera")
    with collecting() as collector:
        answer = traced(collector, tmp_path, "/completions?secret=1", json=BODY, headers={"traceparent": SAMPLED})
        spans = collector.of_trace(TRACE_ID, 8)
    assert collector.headers["x-collector-key"] == "mine"
    by_name: dict[str, list[Span]] = {}
    for span in spans:
        assert span.service == "my-tessera"
        by_name.setdefault(span.name, []).append(span)
    (server,), (generation,) = by_name["POST /v1/completions"], by_name["text_completion tiny"]
    assert (server.parent_id, generation.parent_id) == (PARENT_ID, server.span_id)
    assert answer.headers["traceresponse"] == f"00-{TRACE_ID}-{server.span_id}-01"
    assert server.attributes["http.route"] == "/v1/completions"
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["client.address"] == "127.0.0.1"
    assert "secret" not in str(spans)
    shown = generation.attributes
    for name in ("time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill", "time_in_model_decode"):
        assert shown.pop(f"gen_ai.latency.{name}") >= 0
    assert shown == {
        "gen_ai.latency.time_in_model_inference": 0.0,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tessera",
        "gen_ai.request.id": answer.headers["x-request-id"],
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.input_tokens": len(ids("hello")),
        "gen_ai.usage.prompt_tokens": len(ids("hello")),
        "gen_ai.usage.output_tokens": 2 * len(ids("hello you")),
        "gen_ai.usage.completion_tokens": 2 * len(ids("hello you")),
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    for name in ("queue", "prefill", "decode"):
        assert [span.parent_id for span in by_name[name]] == 2 * [generation.span_id]
        assert [span.attributes["tessera.choice.index"] for span in by_name[name]] == [0, 1]
    for span in spans:
        assert server.start <= span.start <= span.end <= server.end


def test_spans_are_sent_over_grpc_too(tmp_path: Path) -> None:
    collector = Collector("")

    class Service(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            collector.receive(request.SerializeToString(), {})
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as threads:
        listening = grpc.server(threads)
        add_TraceServiceServicer_to_server(Service(), listening)  # type: ignore[no-untyped-call]
        collector.url = f"grpc://127.0.0.1:{listening.add_insecure_port('127.0.0.1:0')}"
        listening.start()
        traced(collector, tmp_path, "/v1/completions", json=BODY, headers={"traceparent": SAMPLED})
        assert len(collector.of_trace(TRACE_ID, 8)) == 8
        listening.stop(None).wait()


def test_a_request_that_fails_is_a_span_with_an_error_and_polls_are_none(tmp_path: Path) -> None:
    hostile = [(b"traceparent", SAMPLED.encode()), (b"user-agent", b"\xff\\x"), (b"x-odd", b"\xfe\\u12")]
    with collecting() as collector:
        settings = settings_for(write_model_folder(tmp_path), otlp_traces_endpoint=collector.url)
        broken = FakeClient(always([RuntimeError("broken")]))
        with serve(broken, settings) as url:
            assert httpx.get(f"{url}/health", headers={"traceparent": SAMPLED}).status_code == 200
            assert httpx.post(f"{url}/v1/completions", json=BODY, headers=hostile).status_code == 500
        server, generation = collector.of_trace(TRACE_ID, 2)
    if server.name != "POST /v1/completions":
        server, generation = generation, server
    assert (server.status, generation.status) == (ERROR, ERROR)
    assert generation.attributes["error.type"] == "internal_error"
    assert len(collector.spans) == 2


def test_the_caller_decides_whether_a_trace_is_recorded(tmp_path: Path) -> None:
    with collecting() as collector:
        answer = traced(collector, tmp_path, "/v1/completions", json=BODY, headers={"traceparent": NOT_SAMPLED})
        assert answer.headers["traceresponse"].startswith(f"00-{TRACE_ID}-")
        assert answer.headers["traceresponse"].endswith("-00")
        assert collector.spans == []


class Slow(SpanExporter):
    """Takes nothing before it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.go.wait(20)
        self.num_spans += len(spans)
        return SpanExportResult.SUCCESS


def counted(counts: HttpCounts) -> tuple[float, float]:
    """Spans sent and dropped."""
    values = {sample.name: sample.value for family in counts.collect("x") for sample in family.samples}
    return values["x:trace_spans_sent_total"], values["x:trace_spans_dropped_total"]


def test_a_collector_that_is_slow_holds_up_nothing_and_what_it_misses_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    counts, exporter, provider = HttpCounts(()), Slow(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanQueue(exporter, "http://slow", counts))
    tracer = provider.get_tracer("test")
    began = time.perf_counter()
    for _ in range(100):
        tracer.start_span("x").end()
    assert time.perf_counter() - began < 1.0
    num_dropped = counted(counts)[1]
    assert 80 <= num_dropped <= 90  # one batch may be on its way
    exporter.go.set()
    provider.shutdown()
    assert counted(counts) == (100 - num_dropped, num_dropped)
    assert exporter.num_spans == 100 - num_dropped
    complaints = [record.getMessage() for record in caplog.records if record.name == "tessera.tracing"]
    assert complaints == ["1 spans are dropped: http://slow does not take them"], "once a minute"


def test_requests_are_answered_and_the_server_ends_without_a_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = settings_for(write_model_folder(tmp_path), otlp_traces_endpoint=endpoint)
        with serve(hello(), settings) as url:
            for _ in range(20):
                assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
            began = time.perf_counter()
        assert time.perf_counter() - began < 5.0
    for thread in threading.enumerate():  # which would go on under the next tests
        if thread.name == "end of tracing":
            thread.join(20.0)
            assert not thread.is_alive()


def test_the_protocol_is_that_of_the_url_or_of_opentelemetrys_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, kind, endpoint in (
        ("http://c:4318", HttpExporter, "http://c:4318/v1/traces"),
        ("https://c/in/v1/traces", HttpExporter, "https://c/in/v1/traces"),
        ("grpc://c:4317", GrpcExporter, "c:4317"),
        ("http://c:4317", GrpcExporter, "c:4317"),
    ):
        exporter = make_exporter(url)
        assert isinstance(exporter, kind)
        assert exporter._endpoint == endpoint
        exporter.shutdown()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert isinstance(make_exporter("http://c:4317"), HttpExporter)
    with pytest.raises(ConfigError, match=re.escape("grpc://c:1 is for gRPC, but OTEL_EXPORTER_OTLP_PROTOCOL")):
        make_exporter("grpc://c:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json', but must be grpc or"):
        make_exporter("http://c")


def test_without_the_packages_the_option_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.PACKAGES, "opentelemetry.nowhere.at_all", "opentelemetry-nowhere")
    settings = settings_for(write_model_folder(tmp_path), otlp_traces_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"opentelemetry-nowhere is not installed: pip install 'tessera-llm\[otel\]'"):
        call(hello(), settings, "GET", "/v1/models")


def test_servers_without_traces_do_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry") and "tessera" in str(arguments[0].get("__name__", "") if arguments else ""):
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    answer = call(hello(), settings_for(write_model_folder(tmp_path)), "POST", "/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert "traceresponse" not in answer.headers


def test_only_app_processes_know_the_collectors_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    assert "OTEL_EXPORTER_OTLP_HEADERS" not in environment_without_secrets()
    assert "OTEL_EXPORTER_OTLP_HEADERS" in environment_without_secrets(sends_traces=True)


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/messages", "chat"),
        ("/v1/responses", "chat"),
        ("/api/chat", "chat"),
        ("/api/generate", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/api/embed", "embeddings"),
        ("/v1/rerank", "rerank"),
    ],
)
def test_operations_have_the_names_of_the_conventions(path: str, operation: str) -> None:
    assert operation_of(path) == operation
