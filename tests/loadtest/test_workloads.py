"""Prompts of a load test: fresh ones, those of files and traces, and what requests have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.loadtest.options.arrival import ArrivalOptions
from tessera.loadtest.options.work import WorkOptions
from tessera.loadtest.workload.choose import choose_workload
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tessera.loadtest.workload.request_template import CHAT, COMPLETIONS, EMBEDDINGS, RequestTemplate
from tessera.loadtest.workload.workload import Workload
from tessera.options.errors import OptionError
from tests.support.servers.server_fixture import ascii_tokenizer


def bodies(workload: Workload, template: RequestTemplate) -> list[dict[str, Any]]:
    return [json.loads(job.body) for job in workload.jobs(template)]


def chosen(endpoint: str = COMPLETIONS, arrival: ArrivalOptions | None = None, **options: Any) -> Workload:
    return choose_workload(WorkOptions(**options), arrival or ArrivalOptions(), endpoint, 7).workload


def test_parts_of_random_work_share_no_prompt() -> None:
    workload = RandomWorkload(40, 64, 8, 500, seed=3, prefix_len=32, num_prefixes=4)
    parts = [bodies(workload.part(first, 40), RequestTemplate("m")) for first in (0, 40, 80)]
    beginnings = [{tuple(body["prompt"][:16]) for body in part} for part in parts]
    assert not beginnings[0] & beginnings[1]
    assert not beginnings[1] & beginnings[2]
    assert parts[1] == bodies(workload.part(40, 40), RequestTemplate("m"))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{index}"}) + "\n" for index in range(10)))
    return path


def test_parts_of_a_file_share_no_prompt_until_it_ends(lines: Path) -> None:
    workload = chosen(dataset_name="custom", dataset_path=lines, num_prompts=5)
    template = RequestTemplate("m")
    first, second, third = ([body["prompt"] for body in bodies(workload.part(at, 5), template)] for at in (0, 5, 10))
    assert len({*first, *second}) == 10
    assert third == first
    ordered = chosen(dataset_name="custom", dataset_path=lines, num_prompts=3, disable_shuffle=True)
    assert [body["prompt"] for body in bodies(ordered, template)] == ["p0", "p1", "p2"]
    once = chosen(dataset_name="custom", dataset_path=lines, num_prompts=30, no_oversample=True)
    assert once.num_prompts == 10


TRACE = [
    {"timestamp": 1000, "input_length": 10, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 3000, "input_length": 14, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 2000, "input_length": 6, "output_length": 2},
]


def test_a_trace_has_its_times_lengths_and_common_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    options: dict[str, Any] = {"dataset_name": "timed_trace", "dataset_path": path, "trace_block_size": 4}
    workload = chosen(**options, trace_speed=2.0)
    assert workload.due_times() == [0.0, 0.5, 1.0]
    first, second, third = bodies(workload, RequestTemplate("m"))
    assert [len(body["prompt"]) for body in (first, second, third)] == [10, 6, 14]
    assert [body["max_tokens"] for body in (first, second, third)] == [5, 2, 3]
    assert first["prompt"][:8] == third["prompt"][:8]
    assert first["prompt"][:4] != second["prompt"][:4]
    later = bodies(workload.part(3, 3), RequestTemplate("m"))
    assert later[0]["prompt"][:4] != first["prompt"][:4]
    assert chosen(**options, self_timed=False).due_times() is None
    (chat, *_) = bodies(workload, RequestTemplate("m", CHAT))
    assert len(chat["messages"][0]["content"].split()) == 10
    with pytest.raises(OptionError, match="leave out --request-rate"):
        chosen(arrival=ArrivalOptions(request_rate=3.0), **options)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"timestamp": 0, "input_length": 0, "output_length": 1}', '{"timestamp": 0}']
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(TRACE[0]) + "\n" + line)
    with pytest.raises(OptionError, match=r"trace\.jsonl line 2 must be an object with timestamp"):
        chosen(dataset_name="timed_trace", dataset_path=path)


def test_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path.write_text(f"{head}5,ChatGPT,9,9,18,API log\n6,GPT-4,30,4,34,API log\n8,GPT-4,7,0,7,API log\n")
    workload = chosen(dataset_name="burstgpt", dataset_path=path, num_prompts=3)
    found = bodies(workload, RequestTemplate("m"))
    assert [(len(body["prompt"]), body["max_tokens"]) for body in found] == [(30, 4)] * 3
    assert len({tuple(body["prompt"]) for body in found}) == 3
    assert chosen(dataset_name="burstgpt", dataset_path=path, self_timed=True).due_times() == [0.0]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(OptionError, match="is not BurstGPT's CSV: it has no column Timestamp"):
        chosen(dataset_name="burstgpt", dataset_path=path)


def test_sonnet_prompts_share_their_prefix_and_keep_their_length(tmp_path: Path) -> None:
    path, folder = tmp_path / "sonnet.txt", tmp_path / "tokenizer"
    path.write_text("\n".join(f"line number {index} of the poem" for index in range(60)))
    folder.mkdir()
    tokenizer = ascii_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"dataset_name": "sonnet", "dataset_path": path, "input_len": 300, "num_prompts": 5}
    workload = chosen(**options, random_prefix_len=100, tokenizer=str(folder))
    prompts = [body["prompt"] for body in bodies(workload, RequestTemplate("m"))]
    poem = [prompt.partition("\n")[2] for prompt in prompts]
    lengths = [len(tokenizer.encode(text).ids) for text in poem]
    longest_line = 24
    assert all(300 - 2 * longest_line < length <= 300 for length in lengths)
    assert len({text[:100] for text in poem}) == 1
    assert len(set(poem)) == 5
    with pytest.raises(OptionError, match="--sonnet-prefix-len 300 must be below --sonnet-input-len 300"):
        chosen(**options, random_prefix_len=300)


def test_embeddings_have_several_texts_and_no_tokens_to_make() -> None:
    workload = chosen(EMBEDDINGS, num_prompts=2, input_len=5, random_batch_size=3)
    for body in bodies(workload, RequestTemplate("m", EMBEDDINGS)):
        assert set(body) == {"model", "input"}
        assert [len(text.split()) for text in body["input"]] == [5, 5, 5]


def test_prefix_repetition_has_its_own_defaults() -> None:
    workload = chosen(dataset_name="prefix_repetition", num_prompts=20)
    prompts = [body["prompt"] for body in bodies(workload, RequestTemplate("m"))]
    assert {len(prompt) for prompt in prompts} == {512}
    assert len({tuple(prompt[:256]) for prompt in prompts}) == 10


@pytest.mark.parametrize(
    ("arrival", "number"),
    [
        (ArrivalOptions(), 100),
        (ArrivalOptions(max_seconds=60.0, request_rate=10.0), 600),
        (ArrivalOptions(max_seconds=60.0), 12000),
    ],
)
def test_a_run_bounded_in_time_has_prompts_enough(arrival: ArrivalOptions, number: int) -> None:
    assert chosen(arrival=arrival).num_prompts == number
