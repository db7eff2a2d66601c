"""Command lines of `vllm bench serve`, result files, comparison, and what ends or begins a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.app.cli.command import main
from tessera.loadtest import bench as load_bench
from tessera.loadtest.report.comparison import differences
from tessera.loadtest.run.load_run import Outcome
from tessera.loadtest.workload.request_template import RequestTemplate
from tessera.loadtest.workload.workload import Workload
from tests.support.cases.load_outcomes import outcome
from tests.support.fakes.load_stub import Manner, StubServer


def bench(server: StubServer, *options: str) -> int:
    port = server.url.rpartition(":")[2]
    return main(["bench", "--host", "127.0.0.1", "--port", port, "--disable-tqdm", "--processes", "1", *options])


SMALL = ("--num-prompts", "4", "--random-input-len", "5", "--random-output-len", "2")


def test_a_command_line_of_vllm_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "new" / "results"
    saved = ("--save-result", "--save-detailed", "--result-dir", str(results), "--label", "mine")
    sampling = ("--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--temperature", "0.7", "--logprobs", "2")
    unused = ("--trust-remote-code", "--tokenizer-mode", "hf", "--skip-tokenizer-init")
    check = ("--ready-check-timeout-sec", "20", "--request-id-prefix", "bench-", "--served-model-name", "served")
    headers = ("--header", "x-a=1", "x-b=2", "--header", "x-c=3")
    named = ("--model", "org/name", "--metadata", "gpu=H100", "commit=abc", "--percentile-metrics", "ttft,e2el")
    with StubServer() as server:
        server.cached_tokens = 3
        assert bench(server, *SMALL, *saved, *sampling, *unused, *check, *headers, *named) == 0
    assert len(server.exchanges) == 5  # the first is the ready check
    for exchange in server.exchanges:
        expected = {"top_p": 0.9, "top_k": 40, "min_p": 0.1, "temperature": 0.7, "logprobs": 2, "model": "served"}
        assert exchange.body | expected == exchange.body
        assert [exchange.headers[name] for name in ("x-a", "x-b", "x-c")] == ["1", "2", "3"]
    ids = [exchange.headers.get("x-request-id") for exchange in server.exchanges]
    assert sorted(ids[1:], key=str) == [f"bench-0-{number}" for number in range(4)]
    (file,) = results.iterdir()
    assert file.name.startswith("mine-infqps-served-")
    summary = json.loads(file.read_text())
    assert (summary["gpu"], summary["commit"], summary["label"]) == ("H100", "abc", "mine")
    assert summary["total_cached_tokens"] == 12
    assert (summary["input_lens"], summary["output_lens"]) == ([5] * 4, [2] * 4)
    assert len(summary["itls"]) == 4
    printed = capsys.readouterr().out
    assert "12 (60.0%)" in printed
    assert "60.0% of the prompt tokens came from the prefix cache: prompts begin alike" in printed.replace("\n", " ")
    assert "TPOT" not in printed


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Bodies of the requests of runs that reach no server; each request takes a tenth of a second."""
    bodies: list[dict[str, Any]] = []

    def drive(_url: str, template: RequestTemplate, workload: Workload, *_: object, **_options: object) -> Outcome:
        bodies.extend(json.loads(job.body) for job in workload.jobs(template))
        return outcome(*((100.0 + index, [100.1 + index, 100.2 + index], 2, None) for index in range(4)))

    monkeypatch.setattr(load_bench, "drive", drive)
    return bodies


def run(*options: str) -> int:
    return main(["bench", "--model", "m", *SMALL, *options])


def test_each_run_has_prompts_of_its_own_unless_asked_otherwise(sent: list[dict[str, Any]]) -> None:
    def prompts(*options: str) -> list[list[int]]:
        sent.clear()
        assert run(*options) == 0
        return [body["prompt"] for body in sent]

    assert prompts() != prompts()
    assert prompts("--seed", "3") == prompts("--seed", "3") != prompts("--seed", "4")
    assert prompts("--no-fresh-prompts") == prompts("--no-fresh-prompts")


def test_results_are_appended_as_lines(sent: list[dict[str, Any]], tmp_path: Path) -> None:
    for _ in range(2):
        assert run("--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.jsonl") == 0
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["completed"] for row in rows] == [4, 4]
    assert "input_lens" not in rows[0]


def test_other_loads_are_compared_without_a_verdict(
    sent: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, page = tmp_path / "old.json", tmp_path / "page.html"
    assert run("--max-concurrency", "2", "--output", str(old)) == 0
    capsys.readouterr()
    report = ("--compare", str(old), "--html", str(page))
    assert run("--max-concurrency", "1", "--top-k", "3", *report) == 0
    printed = capsys.readouterr()
    assert "of ANOTHER LOAD" in printed.out
    assert "same" not in printed.out
    assert "not the same load: max_concurrency was 2 and is 1" in printed.err
    assert "max_concurrency was 2 and is 1" in page.read_text()
    assert run("--max-concurrency", "2", *report) == 0
    printed = capsys.readouterr()
    assert "ANOTHER LOAD" not in printed.out
    assert "same" in printed.out
    assert printed.err == ""


def test_a_prefix_cache_makes_another_load() -> None:
    old: dict[str, Any] = {"total_input_tokens": 100, "total_cached_tokens": 0, "seed": 1, "base_url": "a"}
    assert differences(old, old | {"seed": 2, "base_url": "b", "input_len": 3}) == []
    (only,) = differences(old, old | {"total_cached_tokens": 50})
    assert only == "the prefix cache gave 0% of the prompt tokens and gives 50%"


def test_no_request_is_sent_after_max_seconds(tmp_path: Path) -> None:
    """Two at a time, of which none ends in time; those under way are completed."""
    output = tmp_path / "figures.json"

    def manner(index: int, _body: dict[str, Any]) -> Manner:
        return Manner(ttft=0.0 if index < 2 else 0.6)

    with StubServer(manner) as server:
        options = ("--num-prompts", "500", "--max-concurrency", "2", "--max-seconds", "0.3", "--output", str(output))
        assert bench(server, *options, "--input-len", "4", "--output-len", "2") == 0
    summary = json.loads(output.read_text())
    assert (summary["completed"], summary["failed"], summary["max_seconds"]) == (4, 0, 0.3)


def test_a_server_that_is_not_ready_in_time_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(lambda _index, _body: Manner(fault="busy")) as server:
        assert bench(server, *SMALL, "--ready-check-timeout-sec", "0.1") == 2
    assert "the server is not ready after 0.1 s: status 429: " in capsys.readouterr().err


def test_embeddings_are_measured_by_their_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    with StubServer() as server:
        options = ("--backend", "openai-embeddings", "--num-prompts", "3", "--input-len", "4")
        assert bench(server, *options, "--random-batch-size", "2", "--output", str(output)) == 0
    assert {exchange.path for exchange in server.exchanges} == {"/v1/embeddings"}
    assert all(len(exchange.body["input"]) == 2 for exchange in server.exchanges)
    summary = json.loads(output.read_text())
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (3, 24, 0)
    printed = capsys.readouterr().out
    assert "input tokens/s" in printed
    assert "Output token" not in printed
