"""One server as operators watch it: its metrics in a real Prometheus, its traces in a collector, its log."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind, Tracer, format_trace_id

from tests.support.fakes.otlp_collector import Collector, Span, collecting
from tests.support.paths import ROOT
from tests.support.servers.dashboard_queries import VLLM_QUERIES, prepared
from tests.support.servers.monitoring import DEPLOY, RULES, queries
from tests.support.servers.server_fixture import Server, running_server

NUM_REQUESTS = 24
GPU_METRICS = "tessera:gpu_"  # which a server on a CPU does not have
COMPARISON = re.compile(r"\s*(==|>|<)\s*[\d.]+")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(tiny_folder: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log_file = tmp_path_factory.mktemp("logs") / "watched.log"
    options = ("--num-kv-blocks", "512", "--otlp-traces-endpoint", collector.url, "--log-format", "json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds, instead of 5,000
        with running_server(tiny_folder, log_file, *options) as server:
            yield server


# -- Prometheus -------------------------------------------------------------------------------------


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[httpx.Client]:
    """A real one with the deployed configuration, but for the server's address and quicker scrapes.

    A second job has the same metrics under vLLM's prefix, as `--metrics-prefix vllm` would give them.
    """
    program = os.environ.get("TESSERA_PROMETHEUS") or shutil.which("prometheus")
    if not program:
        pytest.skip("no Prometheus is installed: neither TESSERA_PROMETHEUS nor prometheus on the PATH")
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [urllib.parse.urlsplit(server.url).netloc]}]
    renamed = {"source_labels": ["__name__"], "regex": "tessera:(.+)", "target_label": "__name__"}
    rename = {"metric_relabel_configs": [{**renamed, "replacement": "vllm:$1"}]}
    config["scrape_configs"].append({**job, "job_name": "vllm", **rename})
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen([program, *options, f"--web.listen-address={listen}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{listen}", timeout=10) as client:
            server.until(lambda: _values(client, 'up{job="tessera"} == 1'), "a scrape by Prometheus")
            yield client
    finally:
        process.kill()
        process.wait()
        log.close()


def _values(client: httpx.Client, query: str) -> list[float]:
    """Of each series; those that are no number are left out. None of them while Prometheus is starting."""
    try:
        answer = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    found = answer.json()
    assert found["status"] == "success", f"{query}: {found}"
    values = [float(series["value"][1]) for series in found["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def test_every_query_of_our_dashboard_rules_and_alerts_and_of_vllms_dashboards_has_data_under_load(
    prometheus: httpx.Client, server: Server
) -> None:
    assert server.http.get("/v1/nothing").status_code == 404  # the dashboard shows errors
    shared = "Once upon a time there was a little dog who liked to run. " * 4

    def complete(number: int) -> int:
        return len(server.tokens(f"{shared}{number}", 8))

    complete(0)
    # A rate needs a series that grows between two scrapes, and one of requests begins with the first of them.
    server.until(lambda: _values(prometheus, 'tessera:http_requests_total{endpoint="/v1/completions"}'), "a request")
    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(complete, range(NUM_REQUESTS))) == 8 * NUM_REQUESTS
    wanted = server.metrics()["generation_tokens_total"]
    server.until(lambda: wanted in _values(prometheus, "tessera:generation_tokens_total"), "the new tokens")
    ours = [COMPARISON.sub("", query) for query in queries() if GPU_METRICS not in query]
    records = [rule["record"] for rule in RULES if "record" in rule]
    theirs = [prepared(query, server.model) for query in VLLM_QUERIES]
    assert len(ours) > 50
    assert len(theirs) > 45
    for query in (
        *ours,
        *records,
        *theirs,
        "sum(tessera:kv_cache_blocks) == sum(tessera:kv_cache_blocks{state!='used'})",
    ):
        # Again where a machine that is busy has missed a scrape.
        server.until(lambda query=query: _values(prometheus, query), f"data for {query}")  # type: ignore[misc]
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert [(rule["health"], rule.get("lastError")) for group in groups for rule in group["rules"]] == (
        len(RULES) * [("ok", None)]
    )


def test_alerts_come_of_what_they_are_for_and_of_nothing_else(tmp_path: Path) -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool, which comes with Prometheus, is not installed")
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    shutil.copy(ROOT / "tests/e2e/alert_cases.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", "alert_cases.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = (ROOT / "tests/e2e/alert_cases.yml").read_text()
    for rule in RULES:
        if "alert" in rule:
            assert rule["alert"] in cases, f"no case has {rule['alert']}"


def test_every_alert_has_a_runbook() -> None:
    page = (ROOT / "docs/operating/runbooks.md").read_text()
    headings = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    alerts = [rule for rule in RULES if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == headings
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/operating/runbooks.md#{rule['alert'].lower()}"


# -- traces -----------------------------------------------------------------------------------------


def tracer_of(service: str, collector: Collector) -> tuple[TracerProvider, Tracer]:
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{collector.url}/v1/traces")))
    return provider, provider.get_tracer(service)


@pytest.fixture
def proxy(server: Server, collector: Collector) -> Iterator[str]:
    """A reverse proxy that has a span of its own for each request, as those with OpenTelemetry do."""
    provider, tracer = tracer_of("proxy", collector)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers["content-length"]))
            with tracer.start_as_current_span("proxy", extract(headers), SpanKind.SERVER):
                inject(headers)
                answer = server.http.post(self.path, content=body, headers=headers)
            self.send_response(answer.status_code)
            for name in ("content-type", "x-request-id", "traceresponse"):
                self.send_header(name, answer.headers[name])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as forwarding:
        thread = threading.Thread(target=forwarding.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{forwarding.server_port}"
        forwarding.shutdown()
        thread.join()
    provider.shutdown()


def test_a_call_of_the_sdk_through_a_proxy_is_one_trace_down_to_the_engine(
    server: Server, proxy: str, collector: Collector
) -> None:
    provider, tracer = tracer_of("application", collector)
    headers: dict[str, str] = {}
    with (
        openai.OpenAI(base_url=f"{proxy}/v1", api_key="none", max_retries=0) as sdk,
        tracer.start_as_current_span("ask") as root,
    ):
        inject(headers)
        raw = sdk.chat.completions.with_raw_response.create(
            model=server.model,
            messages=[{"role": "user", "content": "Once upon a time"}],
            max_tokens=24,
            extra_body={"ignore_eos": True},
            extra_headers=headers,
        )
        trace_id = format_trace_id(root.get_span_context().trace_id)
    provider.shutdown()
    usage = raw.parse().usage
    assert usage is not None
    spans = {span.name: span for span in collector.of_trace(trace_id, 7)}
    request, chat = "POST /v1/chat/completions", f"chat {server.model}"
    parents = {"proxy": "ask", request: "proxy", chat: request, "queue": chat, "prefill": chat, "decode": chat}
    assert spans.keys() == {"ask", *parents}
    for name, parent in parents.items():
        assert spans[name].parent_id == spans[parent].span_id, name
        # A server may end its span after its client has read all of the response.
        late = 0 if spans[name].service == spans[parent].service else 1e9
        assert spans[parent].start <= spans[name].start <= spans[name].end <= spans[parent].end + late, name
    assert [spans[name].service for name in ("ask", "proxy", request, "decode")] == [
        *("application", "proxy", "tessera", "tessera"),
    ]
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert queue.end == pytest.approx(prefill.start, abs=1000)
    assert prefill.end == pytest.approx(decode.start, abs=1000)
    assert _seconds(prefill) > 0
    assert _seconds(decode) > 0
    attributes = spans[chat].attributes
    assert attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens == 24
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.request.max_tokens"] == 24
    assert raw.headers["traceresponse"].split("-")[1] == trace_id
    assert _log_line(server, raw.headers["x-request-id"])["trace_id"] == trace_id


def _seconds(span: Span) -> float:
    return (span.end - span.start) / 1e9


def _log_line(server: Server, request_id: str) -> dict[str, Any]:
    """The line of a finished request."""
    (line,) = server.until(
        lambda: [line for line in map(json.loads, server.log.splitlines()) if line.get("id") == request_id],
        "the request's log line",
    )
    found: dict[str, Any] = line
    assert found["client"] == "127.0.0.1"
    assert found["status"] == 200
    assert {"prompt_tokens", "output_tokens", "queue_ms", "ttft_ms", "total_ms"} <= found.keys()
    return found


def test_every_line_of_every_process_is_an_object(server: Server) -> None:
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
