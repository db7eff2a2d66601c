"""`tessera bench` against a server whose delays are known, and against the built-in model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.app.cli.command import main
from tessera.loadtest.run.load_run import drive
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tessera.loadtest.workload.request_template import RequestTemplate
from tests.support.fakes.load_stub import Manner, StubServer
from tests.support.paths import ROOT
from tests.support.servers.load_page import check_page
from tests.support.servers.server_fixture import Server


def bench(url: str, *options: str) -> int:
    return main(["bench", "--base-url", url, "--no-progress", *options])


def test_two_processes_record_on_the_server_s_clock() -> None:
    """Their figures are exact in `test_times.py`; here: no request is noted too late, no token too early."""
    with StubServer(lambda _index, _body: Manner(ttft=0.12, tpot=0.012)) as server:
        arrival = Arrival(max_concurrency=8)
        outcome = drive(server.url, RequestTemplate("stub"), RandomWorkload(24, 50, 30, 500), arrival, processes=2)
    records, exchanges = outcome.records, server.exchanges
    assert (records.ok.sum(), records.errors, len(outcome.cpu_shares)) == (24, {}, 2)
    assert (records.input_tokens.tolist(), records.output_tokens.tolist()) == ([50] * 24, [30] * 24)
    assert server.most_running == 8
    # The first to be sent is noted no later than any arrives, the second no later than any but one, and so on.
    received = np.sort([exchange.received for exchange in exchanges])
    sent = np.sort([time for exchange in exchanges for time in exchange.sent])
    assert outcome.start <= records.start[0]
    assert (np.sort(records.start) <= received).all()
    assert (np.sort(records.token_times) >= sent).all()
    assert (records.first > records.start).all()
    assert records.end.max() >= sent[-1]


FAULTS = ("busy", "reset", "cut", "event", "garbage", "silent")


def test_failures_are_counted_by_kind_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def manner(index: int, _body: dict[str, Any]) -> Manner:
        return Manner(fault=FAULTS[index] if index < len(FAULTS) else "busy" if index == 6 else None)

    output, page = tmp_path / "new.json", tmp_path / "new.html"
    with StubServer(manner) as server:
        options = ("--num-prompts", "12", "--max-concurrency", "12", "--input-len", "20", "--output-len", "5")
        files = ("--output", str(output), "--html", str(page))
        limits = ("--request-timeout", "3", "--goodput", "ttft:60000", "tpot:60000")
        assert bench(server.url, *options, *files, *limits, "--api-key", "secret", "--header", "x-tenant=a") == 1
    assert {exchange.headers["authorization"] for exchange in server.exchanges} == {"Bearer secret"}
    assert {exchange.headers["x-tenant"] for exchange in server.exchanges} == {"a"}
    summary = json.loads(output.read_text())
    assert summary["errors"] == {
        "HTTP 429": 2,
        "connection broken": 1,
        "error event: server_error": 1,
        "malformed answer": 1,
        "no [DONE]": 1,
        "timeout": 1,
    }
    assert (summary["completed"], summary["failed"]) == (5, 7)
    assert summary["total_output_tokens"] == 25
    assert summary["goodput_share"] == pytest.approx(5 / 12)
    assert summary["model_id"] == "stub"
    printed = capsys.readouterr()
    assert "2 x HTTP 429" in printed.err
    assert "too many requests" in printed.err
    assert "Failed requests" in printed.out
    assert "the engine broke" in check_page(page, num_plots=8)


def test_a_conversation_grows_by_its_completions(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    with StubServer() as server:
        options = ("--num-prompts", "2", "--num-turns", "3", "--input-len", "4", "--output-len", "2")
        assert bench(f"{server.url}/v1/", "--backend", "openai-chat", *options, "--output", str(output)) == 0
    assert len(server.exchanges) == 6
    assert {exchange.path for exchange in server.exchanges} == {"/v1/chat/completions"}
    longest = max((exchange.body["messages"] for exchange in server.exchanges), key=len)
    assert [message["role"] for message in longest] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in longest[1::2]] == ["t0 t1 "] * 2
    starts = {exchange.body["messages"][0]["content"] for exchange in server.exchanges}
    assert len(starts) == 2
    assert json.loads(output.read_text())["total_output_tokens"] == 12


def test_completions_that_are_not_streamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    with StubServer() as server:
        options = ("--num-prompts", "11", "--input-len", "5", "--output-len", "1", "--request-rate", "500")
        extra = ("--burstiness", "inf", "--no-stream", "--extra-body", '{"top_k": 7}', "--no-ignore-eos")
        assert bench(server.url, *options, *extra, "--output", str(output)) == 0
    assert all(exchange.body["top_k"] == 7 and "ignore_eos" not in exchange.body for exchange in server.exchanges)
    summary = json.loads(output.read_text())
    assert (summary["mean_ttft_ms"], summary["total_output_tokens"]) == (0, 11)
    assert summary["median_e2el_ms"] > 0
    assert "TTFT" not in capsys.readouterr().out


def test_ctrl_c_still_reports(tmp_path: Path) -> None:
    """The first four completions are complete; the others would take minutes."""
    output, page = tmp_path / "figures.json", tmp_path / "page.html"
    with StubServer(lambda index, _body: Manner(tpot=0 if index < 4 else 60)) as server:
        command = [sys.executable, "-m", "loadtest", "--base-url", server.url, "--num-prompts", "100"]
        options = ["--max-concurrency", "6", "--processes", "2", "--output", str(output), "--html", str(page)]
        process = subprocess.Popen(
            [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        server.wait_until(lambda: len(server.exchanges) == 10 and all(each.sent for each in server.exchanges))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the client processes as well
        printed, complaints = process.communicate(timeout=30)
    assert process.returncode == 130
    summary = json.loads(output.read_text())
    assert summary["interrupted"] is True
    assert (summary["completed"], summary["errors"]) == (4, {"interrupted": 6})
    assert b"Successful requests" in printed
    assert b"Traceback" not in complaints
    check_page(page, num_plots=8)


def test_the_built_in_model_on_the_cpu(
    builtin_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short chat completions, compared with an earlier run that was slower."""
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    options = ("--backend", "openai-chat", "--num-prompts", "6", "--max-concurrency", "3", "--input-len", "16")
    assert bench(builtin_server.url, *options, "--output-len", "8", "--output", str(new)) == 0
    summary = json.loads(new.read_text())
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (6, 0, 48)
    assert summary["model_id"] == "tessera-builtin"
    assert 0 < summary["mean_tpot_ms"] < summary["mean_e2el_ms"]
    assert 0 < summary["median_ttft_ms"] <= summary["median_e2el_ms"]
    old.write_text(json.dumps(summary | {"median_e2el_ms": summary["median_e2el_ms"] * 1000}))
    capsys.readouterr()
    assert bench(builtin_server.url, *options, "--output-len", "8", "--compare", str(old)) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "Median E2EL" in line]
    assert "better" in row
