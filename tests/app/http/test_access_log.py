"""What an operator reads of each request: one line with its cost and its end, and nothing that was said in it."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.app.http.access_log import LINES_AT_A_TIME, RequestLog
from tessera.app.http.counts import HttpCounts
from tessera.app.limits.shared_memory import make_shared_memory
from tessera.engine.contract.errors import QueueFullError
from tessera.engine.contract.logs import JsonFormatter, TextFormatter
from tessera.engine.contract.messages import GpuUsage
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids, settings_for, write_model_folder

SECRET = "the prompt's own words"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT = "127.0.0.1"  # of the test client
BODY = {"model": "tiny", "prompt": SECRET, "max_tokens": 8}
HELLO = play(ids("hello you"), finish="length", num_cached_tokens=3)
HELLO[0] = msgspec.structs.replace(HELLO[0], queue_time=0.25)


@pytest.fixture(autouse=True)
def _lines_of_single_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tessera.request")


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "tessera.request"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line_with_its_tokens_times_and_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    answer = call(
        FakeClient(always(HELLO)),
        settings,
        "POST",
        "/v1/completions",
        json={**BODY, "stream": stream, "n": 2},
        headers={"x-request-id": "mine", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"},
    )
    assert answer.status_code == 200
    (line,) = lines(caplog)
    assert line["ttft_ms"] <= line["total_ms"]
    assert line["tpot_ms"] >= 0
    del line["ttft_ms"], line["total_ms"], line["tpot_ms"]
    assert line == {
        "id": answer.headers["x-request-id"],
        "client": CLIENT,
        "trace_id": TRACE_ID,
        "client_id": "mine",
        "method": "POST",
        "endpoint": "/v1/completions",
        "status": 200,
        "model": "tiny",
        "stream": stream,
        "prompt_tokens": len(ids(SECRET)),
        "cached_tokens": 3,
        "output_tokens": 2 * len(ids("hello you")),
        "choices": 2,
        "queue_ms": 250.0,
        "finish_reason": "length",
    }


def test_prompts_are_logged_only_where_that_was_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model_folder(tmp_path)
    wrong = {**BODY, "model": SECRET}
    for body in (BODY, wrong, {**BODY, "n": SECRET}):
        call(FakeClient(always(HELLO)), settings_for(folder), "POST", "/v1/completions", json=body)
    assert len(lines(caplog)) == 3
    assert SECRET not in caplog.text + str(lines(caplog))
    caplog.clear()
    call(FakeClient(always(HELLO)), settings_for(folder, log_prompts=True), "POST", "/v1/completions", json=BODY)
    assert lines(caplog)[0]["prompt"] == SECRET


def test_a_request_that_fails_has_its_status_and_the_errors_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(write_model_folder(tmp_path), api_keys=("right",))
    full = FakeClient(always([QueueFullError("full", retry_after=1)]))
    headers = {"authorization": "Bearer right"}
    call(full, settings, "POST", "/v1/completions", json=BODY, headers=headers)
    call(full, settings, "POST", "/v1/completions", json={**BODY, "stream": True}, headers=headers)
    call(full, settings, "POST", "/v1/completions", json={**BODY, "n": 0}, headers=headers)
    call(full, settings, "POST", "/v1/completions", json=BODY)
    call(full, settings, "GET", "/nowhere%0AINFO", headers=headers)
    found = [(line["status"], line["error"], line.get("param")) for line in lines(caplog)]
    queue_full = (429, QueueFullError("", retry_after=1).code or QueueFullError.type, None)
    refusals = [(400, "invalid_request_error", "n"), (401, "invalid_api_key", None), (404, "unknown_url", None)]
    assert found == [queue_full, queue_full, *refusals]


def test_a_failure_on_the_way_is_told_from_a_whole_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    broken = FakeClient(always([HELLO[0], QueueFullError("full", retry_after=1)]))
    call(broken, settings, "POST", "/v1/completions", json={**BODY, "stream": True})
    (line,) = lines(caplog)
    assert (line["status"], line["finish_reason"], line["output_tokens"]) == (200, "error", 1)


def test_what_asks_again_and_again_leaves_no_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    for path in ("/health", "/ready", "/metrics", "/version", "/", "/status.json", "/ui/style/theme.css"):
        call(FakeClient(always(HELLO)), settings, "GET", path)
    assert not lines(caplog)


def record_of(message: str, **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("tessera.x", logging.INFO, "", 0, message, (), None)
    record.fields = fields
    return record


def test_a_line_of_text_cannot_be_forged() -> None:
    line = TextFormatter().format(
        record_of("request", endpoint="/a\nINFO b=c", status=200, model="Qwen/Qwen3-0.6B", stream=True)
    )
    assert line.endswith(
        r' INFO tessera.x: request endpoint="/a\nINFO b=c" status=200 model=Qwen/Qwen3-0.6B stream=true'
    )


def test_a_json_line_is_one_object_with_its_fields() -> None:
    line = JsonFormatter().format(record_of("a\nb", ttft_ms=1.5, prompt='"\n'))
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {"level": "info", "logger": "tessera.x", "message": "a\nb", "ttft_ms": 1.5, "prompt": '"\n'}


def test_http_requests_are_counted_by_endpoint_and_status() -> None:
    fd = make_shared_memory("counts")
    first = HttpCounts(["/a", "/b"], fd=fd, num_rows=2, row=0)
    second = HttpCounts(["/a", "/b"], fd=fd, num_rows=2, row=1)
    for counts, endpoint, status in ((first, "/a", 200), (second, "/a", 200), (second, "/?id=7", 599)):
        counts.count_response(endpoint, status)
    restarted = HttpCounts(["/a", "/b"], fd=fd, num_rows=2, row=1)
    restarted.count_response("/b", 429)
    first.set_open_connections(3)
    restarted.set_open_connections(4)
    first.count_spans(sent=1, dropped=5)
    restarted.count_spans(sent=2)
    for counts in (first, restarted):
        samples: dict[tuple[str, ...], float] = {
            (s.name, *s.labels.values()): s.value
            for family in counts.collect("x")
            for s in family.samples
            if "event_loop_lag" not in s.name
        }
        requests = {("/a", "200"): 2, ("/b", "429"): 1, ("other", "other"): 1}
        assert samples == {
            ("x:http_connections",): 7,
            ("x:http_connections_dropped_total",): 0,
            ("x:trace_spans_sent_total",): 3,
            ("x:trace_spans_dropped_total",): 5,
        } | {("x:http_requests_total", *labels): value for labels, value in requests.items()}


def test_metrics_name_the_gpu_where_one_is_known(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), metrics_prefix="vllm")
    client = FakeClient(always(HELLO))
    assert ":gpu_" not in call(client, settings, "GET", "/metrics").text
    client.gpu = GpuUsage(3, 4, 0.5)
    text = call(client, settings, "GET", "/metrics").text
    for sample in ("gpu_memory_used_bytes 3.0", "gpu_memory_total_bytes 4.0", "gpu_utilization_perc 0.5"):
        assert f"\nvllm:{sample}\n" in text
    client.gpu = GpuUsage(3, 4, None)
    assert "utilization" not in call(client, settings, "GET", "/metrics").text


def test_lines_that_wait_are_written_after_what_the_loop_has_to_do_some_at_a_time() -> None:
    written: list[int | str] = []
    log = RequestLog()
    log.add(lambda: written.append("at once"))
    log.delay = 1e-6
    count = 2 * LINES_AT_A_TIME + 1

    async def run() -> None:
        for number in range(count):
            log.add(partial(written.append, number))
        assert written == ["at once"]
        while len(written) < 1 + count:
            before = len(written)
            await asyncio.sleep(0)
            assert len(written) - before <= LINES_AT_A_TIME

    asyncio.run(asyncio.wait_for(run(), 10))
    assert written == ["at once", *range(count)]


def test_lines_that_wait_when_a_server_ends_are_written() -> None:
    written: list[int] = []
    log = RequestLog()
    log.delay = 60.0

    async def run() -> None:
        for number in range(3):
            log.add(partial(written.append, number))
        log.flush()

    asyncio.run(run())
    assert written == [0, 1, 2]


def test_a_line_that_fails_leaves_the_others() -> None:
    written: list[int] = []
    errors: list[object] = []
    log = RequestLog()
    log.delay = 1e-6

    def fail() -> None:
        raise ValueError

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        log.add(partial(written.append, 0))
        log.add(fail)
        log.add(partial(written.append, 1))
        while len(written) < 2:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert written == [0, 1]
    assert [type(error) for error in errors] == [ValueError]
