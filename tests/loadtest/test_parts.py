"""The load test's parts: when requests are sent, what is asked, how figures are counted, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.app.cli.command import main
from tessera.loadtest import bench
from tessera.loadtest.client.timed_completion import TimedCompletion
from tessera.loadtest.report.comparison import compare
from tessera.loadtest.run.summary import summarize
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.dialogue_file import FileWorkload, read_dialogues
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tessera.loadtest.workload.request_template import CHAT, RequestTemplate
from tessera.options.errors import OptionError
from tests.support.cases.load_outcomes import outcome


def test_figures_of_known_requests() -> None:
    two = (100.0, [100.1, 100.2, 100.4], 3, None), (100.5, [101.0, 101.1], 3, None)
    failed = (100.2, [100.3], 1, "HTTP 500")
    summary = summarize(outcome(*two, failed), {"ttft": 200, "tpot": 1000}, [75])
    assert (summary["completed"], summary["failed"], summary["errors"]) == (2, 1, {"HTTP 500": 1})
    assert summary["duration"] == pytest.approx(1.1)
    assert summary["output_throughput"] == pytest.approx(6 / 1.1)
    assert summary["total_token_throughput"] == pytest.approx(26 / 1.1)
    assert summary["mean_ttft_ms"] == pytest.approx(300)
    assert summary["p75_ttft_ms"] == pytest.approx(400)
    assert summary["std_ttft_ms"] == pytest.approx(200)
    assert summary["mean_tpot_ms"] == pytest.approx(100)  # (300 / 2 + 100 / 2) / 2
    assert summary["mean_itl_ms"] == pytest.approx(400 / 3)  # gaps of 100, 200 and 100
    assert summary["median_e2el_ms"] == pytest.approx(500)
    assert summary["request_goodput"] == pytest.approx(1 / 1.1)
    assert summary["goodput_share"] == pytest.approx(1 / 3)
    assert summary["max_concurrent_requests"] == 2
    assert summary["client_cpu_share"] == 0.1


def test_no_request_gives_zeros() -> None:
    summary = summarize(outcome())
    assert (summary["completed"], summary["request_throughput"], summary["p99_itl_ms"]) == (0, 0, 0)


def test_a_stream_is_read_however_it_is_cut() -> None:
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "Hä"}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": ""}, "finish_reason": None}]},  # half of a character
        {"choices": [{"delta": {"content": "llo"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}},
    ]
    frames = [f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in events]
    stream = ": a comment\n\n" + "".join(frames) + "data: [DONE]\n\n"
    for size in (1, 7, 10_000):
        completion = TimedCompletion(keep_text=True)
        data = stream.encode()
        for place in range(0, len(data), size):
            completion.receive(data[place : place + size])
        assert (completion.finished, completion.error, completion.text) == (True, None, "Hällo")
        assert (len(completion.token_times), completion.input_tokens, completion.output_tokens) == (3, 7, 4)


@pytest.mark.parametrize("line", ['{"choices": [3]}', "[]", '{"choices": {"a": 1}}', '{"usage": 5, "choices": []}'])
def test_a_strange_event_fails_its_request_alone(line: str) -> None:
    completion = TimedCompletion()
    completion.receive(f"data: {line}\n\n".encode())
    assert completion.error == "malformed answer"


def test_arrival_times() -> None:
    number = 4000
    assert Arrival().times(3, 0).tolist() == [0, 0, 0]
    assert np.allclose(Arrival(20, math.inf).times(5, 0), [0, 0.05, 0.1, 0.15, 0.2])
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(Arrival(50, burstiness).times(number, seed=3))
        assert gaps.mean() == pytest.approx(1 / 50, rel=0.01)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)  # of a gamma distribution
    for ramp in ("linear", "exponential"):
        gaps = np.diff(Arrival(burstiness=math.inf, ramp=ramp, ramp_start=2, ramp_end=50).times(101, 0))
        assert gaps[-1] == pytest.approx(1 / 50)
        assert np.all(np.diff(gaps) < 0)
    middle = np.diff(Arrival(burstiness=math.inf, ramp="exponential", ramp_start=4, ramp_end=100).times(101, 0))[49]
    assert middle == pytest.approx(1 / 20, rel=0.02)


def bodies(workload: RandomWorkload | FileWorkload, template: RequestTemplate) -> list[dict[str, Any]]:
    return [json.loads(job.body) for job in workload.jobs(template)]


def test_random_prompts_share_their_prefixes_and_spread_their_lengths() -> None:
    workload = RandomWorkload(60, 100, 40, 500, seed=5, range_ratio=0.5, prefix_len=30, num_prefixes=2)
    found = bodies(workload, RequestTemplate("m"))
    assert found == bodies(workload, RequestTemplate("m"))
    assert found != bodies(workload.part(60, 60), RequestTemplate("m"))
    assert {tuple(body["prompt"][:30]) for body in found[::2]} != {tuple(body["prompt"][:30]) for body in found[1::2]}
    assert len({tuple(body["prompt"][:30]) for body in found}) == 2
    lengths = [len(body["prompt"]) - 30 for body in found]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 20
    assert {body["ignore_eos"] for body in found} == {True}
    assert all(20 <= body["max_tokens"] <= 60 for body in found)
    assert all(16 <= token < 500 for body in found for token in body["prompt"])


def test_files_of_conversations(tmp_path: Path) -> None:
    said = [("system", "be kind"), ("human", "first"), ("gpt", "a" * 40), ("human", "second"), ("gpt", "b")]
    share_gpt = tmp_path / "sharegpt.json"
    share_gpt.write_text(json.dumps([{"conversations": [{"from": who, "value": what} for who, what in said]}]))
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "p0"}\n\n{"prompt": "p1", "output_tokens": 9}\n')
    workload = FileWorkload(read_dialogues(share_gpt), 2, num_turns=2)
    assert workload.num_requests == 4
    job, _ = workload.jobs(RequestTemplate("m", CHAT))
    body = json.loads(job.body)
    assert [message["content"] for message in body["messages"]] == ["be kind", "first"]
    assert (body["max_completion_tokens"], job.turns) == (10, ["second"])
    found = bodies(FileWorkload(read_dialogues(lines), 4), RequestTemplate("m", ignore_eos=False))
    assert sorted((body["prompt"], body["max_tokens"]) for body in found[:2]) == [("p0", 256), ("p1", 9)]
    assert "ignore_eos" not in found[0]
    for content in ("", "[]", "nonsense", '{"prompt"', '{"text": "a"}', "[3]"):
        lines.write_text(content)
        with pytest.raises(OptionError, match="--dataset-path"):
            read_dialogues(lines)


def test_comparison_knows_what_is_better() -> None:
    old = {"request_throughput": 10.0, "output_throughput": 100.0, "mean_ttft_ms": 50.0, "p99_itl_ms": 0.0}
    new = {"request_throughput": 12.0, "output_throughput": 100.5, "mean_ttft_ms": 75.0, "p99_itl_ms": 3.0}
    rows: dict[str, Any] = {name: (ratio, verdict) for name, _, _, ratio, verdict in compare(old, new)}
    assert rows == {
        "Request throughput (req/s)": (pytest.approx(1.2), "better"),
        "Output token throughput (tok/s)": (pytest.approx(1.005), "same"),
        "Mean TTFT (ms)": (pytest.approx(1.5), "worse"),
    }


def test_a_busy_client_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    busy = outcome((100.0, [100.1, 100.2], 2, None), cpu_share=0.93)
    monkeypatch.setattr(bench, "drive", lambda *_args, **_options: busy)
    assert main(["bench", "--model", "m"]) == 0
    assert "a client process used 93% of a core" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "localhost:8000"], "--base-url: must begin with http:// or https://"),
        (["--num-prompts", "0"], "--num-prompts: must be a whole number from 1"),
        (["--request-rate", "-1"], "--request-rate: must be a number from"),
        (["--goodput", "itl:30"], "must be one of ttft, tpot, e2el"),
        (["--extra-body", "[]"], "--extra-body: must be a JSON object"),
        (["--header", "x"], "--header: must be NAME=VALUE"),
        (["--percentile-metrics", "ttft,x"], "invalid choice: 'x' (choose from ttft, tpot, itl, e2el)"),
        (["--metric-percentiles", "50,101"], "must be a number from 0 to 100"),
        (["--sweep"], "--sweep needs --goodput"),
        (["--sweep", "--goodput", "ttft:9", "--request-rate", "3"], "leave out --request-rate"),
        (["--sweep-concurrency", "4,x"], "must be whole numbers from 1 to 1048576 with commas, not 'x'"),
        (["--sweep-concurrency", "--max-concurrency", "3"], "leave out --max-concurrency"),
        (["--sweep-concurrency", "--sweep", "--goodput", "ttft:9"], "exclude each other"),
        (["--self-timed"], "--self-timed needs --dataset-name timed_trace or burstgpt"),
        (["--dataset-path", "x"], "--dataset-path needs --dataset-name, one of sharegpt"),
        (["--tokenizer", "/nowhere/at/all"], "--tokenizer /nowhere/at/all is no folder"),
        (["--metadata", "gpu"], "must be KEY=VALUE"),
        (["--output", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--ramp-up-strategy", "linear"], "a ramp needs all of"),
        (["--num-turns", "2"], "needs a chat endpoint"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "No such file"),
        (["--compare", "/nowhere"], "No such file"),
        (["--compare", __file__], "is not JSON"),
    ],
)
def test_wrong_options_are_explained(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "--model", "m", *options])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    assert code == 2
    complaint = capsys.readouterr().err
    assert message in complaint
    assert complaint.startswith("tessera bench: ")


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "tessera bench: http://127.0.0.1:9" in capsys.readouterr().err
