"""What goes wrong around a served model: engines killed, clients gone, signals, and wrong requests of all kinds."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.models.tiny_models import VOCAB_SIZE, prompt
from tests.support.servers.server_fixture import (
    DEADLINE,
    HEALTH_DEADLINE,
    MAX_MODEL_LEN,
    Answer,
    Server,
    async_client,
    running_server,
    stream_answer,
)

PROMPT = prompt()[:12]
ENDLESS = MAX_MODEL_LEN - len(PROMPT)  # most that a context leaves room for: seconds of work
SEEDED = {"temperature": 1.0, "seed": 11}

# -- the engine's death, and an orderly end -------------------------------------------------------


def test_fault_false_health_a_killed_engine_fails_what_runs_and_comes_back_the_same(
    tiny_server: Server, tiny_folder: Path, tmp_path: Path
) -> None:
    with running_server(tiny_folder, tmp_path / "log", "--num-kv-blocks", "1024") as server:
        pid = server.engine_pid()
        assert pid is not None
        errors = asyncio.run(_kill_while_serving(server, pid))
        assert len(errors) == 6
        for error in errors:
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("server_error", "engine_died")
        server.until(lambda: server.http.get("/health").status_code == 503, "an unhealthy server", HEALTH_DEADLINE)
        refused = server.http.post("/v1/completions", json=server.body(PROMPT, 4))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        server.until(lambda: server.http.get("/health").status_code == 200, "the engine's return")
        assert server.engine_pid() not in (pid, None)
        for sampling in ({}, SEEDED):
            assert server.tokens(PROMPT, 16, **sampling) == tiny_server.tokens(PROMPT, 16, **sampling)
        server.until_idle()
        _terminate_while_streaming(server, tiny_server.tokens(PROMPT, 150))


async def _kill_while_serving(server: Server, pid: int) -> list[dict[str, Any]]:
    """Kill the engine once four streams, one of them the SDK's, are under way; -> every request's error."""
    begun = [asyncio.Event() for _ in range(4)]

    async def streamed(client: httpx.AsyncClient, index: int) -> dict[str, Any]:
        body = {**server.body(PROMPT, ENDLESS), "stream": True, "n": 1 + index}
        last = {}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line and line != "data: [DONE]":
                    begun[index].set()
                    last = json.loads(line.removeprefix("data: "))
        found: dict[str, Any] = last["error"]
        return found

    async def through_the_sdk(sdk: openai.AsyncOpenAI) -> dict[str, Any]:
        body = server.body(PROMPT, ENDLESS)
        stream = await sdk.completions.create(model=server.model, prompt=PROMPT, stream=True, extra_body=body)

        async def read() -> None:
            async for _ in stream:
                begun[3].set()

        with pytest.raises(openai.APIError) as raised:
            await read()
        assert isinstance(raised.value.body, dict)
        found: dict[str, Any] = raised.value.body
        return found

    async def whole(client: httpx.AsyncClient) -> dict[str, Any]:
        response = await client.post("/v1/completions", json=server.body(PROMPT, ENDLESS))
        assert response.status_code == 500
        found: dict[str, Any] = response.json()["error"]
        return found

    async def kill() -> None:
        for event in begun:
            await event.wait()
        server.until(lambda: server.metrics()["num_requests_running"] == 9, "all sequences running")
        os.kill(pid, signal.SIGKILL)

    base_url = server.url + "/v1"
    async with (
        async_client(server) as client,
        openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=DEADLINE) as sdk,
    ):
        requests = [*(streamed(client, index) for index in range(3)), whole(client), whole(client)]
        killing = asyncio.create_task(kill())
        errors = await asyncio.gather(*requests, through_the_sdk(sdk))
        await killing
        return errors


def _terminate_while_streaming(server: Server, expected: list[int]) -> None:
    """SIGTERM lets a running stream finish with all its tokens; nobody else gets in."""
    answer = Answer()
    with server.stream(server.body(PROMPT, len(expected))) as frames:
        answer.add(next(frames)["choices"][0])
        server.process.send_signal(signal.SIGTERM)
        for frame in frames:
            answer.add(frame["choices"][0])
    assert (answer.token_ids, answer.finish_reason) == (expected, "length")
    assert server.end() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")
    assert "Traceback" not in server.log


# -- clients that leave ---------------------------------------------------------------------------


def test_fault_kv_life_cycle_a_disconnect_stops_the_work_and_frees_the_blocks(tiny_server: Server) -> None:
    aborted = 'request_success_total{finished_reason="abort",}'
    tiny_server.until_idle()
    before = tiny_server.metrics()[aborted]
    with tiny_server.stream(tiny_server.body(PROMPT, ENDLESS, n=3)) as frames:
        next(frames)
        found = tiny_server.metrics()
        assert found["num_requests_running"] + found["num_requests_waiting"] == 3
        assert found["kv_cache_usage_perc"] > 0
    tiny_server.until_idle()
    assert tiny_server.metrics()[aborted] == before + 3

    async def leave_without_an_answer() -> None:
        async with async_client(tiny_server) as client:
            waiting = asyncio.create_task(client.post("/v1/completions", json=tiny_server.body(PROMPT, ENDLESS)))
            for _ in range(500):
                metrics = (await client.get("/metrics")).text
                if 'num_requests_running{model_name="tiny"} 1.0' in metrics:
                    break
            else:
                raise AssertionError("the request does not run")
            waiting.cancel()

    asyncio.run(leave_without_an_answer())
    tiny_server.until_idle()
    assert tiny_server.metrics()[aborted] == before + 4


# -- a matrix of requests -------------------------------------------------------------------------

SOUND: dict[str, list[Any]] = {
    "stream": [False, True],
    "stream_options": [None, {"include_usage": True}],
    "n": [None, 1, 3],
    "max_tokens": [5, 12],
    "min_tokens": [None, 0, 4],
    "temperature": [0, 1.0, 1e-4, 2],
    "top_p": [None, 0, 1e-4, 0.9],
    "top_k": [-1, 1, 2**31 - 1],
    "min_p": [None, 0.5, 1],
    "top_n_sigma": [None, 0, 0.5, 100],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "presence_penalty": [None, -2, 1.5],
    "frequency_penalty": [0, 2],
    "repetition_penalty": [None, 1e-4, 10],
    "logit_bias": [None, {"2": 100}, {"5": -100, "127": 1.5}],
    "stop": [None, "e", ["ab", "M", "\u20ac"]],
    "stop_token_ids": [None, [], [49, 73]],
    "ignore_eos": [None, True],
    "include_stop_str_in_output": [None, True],
    "skip_special_tokens": [None, False],
    "return_token_ids": [None, True],
    "truncate_prompt_tokens": [None, 2, -1],
    "prompt_logprobs": [None, 0, 2],
    "cache_salt": [None, "salt"],
    "priority": [None, -5],
}
WRONG: dict[str, list[Any]] = {
    "stream": ["yes", 1],
    "n": [0, 129, "2", 1.5, True],
    "max_tokens": [-1, 2**31, "12"],
    "min_tokens": [-1, 100],
    "temperature": [-0.1, 2.1, math.nan, math.inf, "0"],
    "top_p": [-0.1, 1.1, math.nan],
    "top_k": [-2, 2**31, 0.5],
    "min_p": [-0.1, 1.1],
    "top_n_sigma": [-1, 101, math.nan],
    "seed": [2**64, -(2**63) - 1, "x"],
    "presence_penalty": [-2.1, 3],
    "frequency_penalty": [2.5, math.nan],
    "repetition_penalty": [0, -1, 11],
    "logit_bias": [{"128": 1}, {"-1": 1}, {"5": 101}, {"x": 1}, [5]],
    "stop": ["", ["a"] * 65, [1], "x" * 1000],
    "stop_token_ids": [[-1], [VOCAB_SIZE], [2**31], [2**63], "5"],
    "ignore_eos": ["true"],
    "truncate_prompt_tokens": [0, -2],
    "prompt_logprobs": [-2, 21, True],
    "cache_salt": ["", 5],
    "priority": [2**31],
}
KINDS: dict[str, tuple[dict[str, list[Any]], dict[str, list[Any]]]] = {
    "/v1/completions": (
        {
            **SOUND,
            "prompt": ["Hello there", [5, 6, 7], ["a", "b c"], [[5], [6, 7]]],
            "echo": [False, True],
            "logprobs": [None, 0, 5],
        },
        {
            **WRONG,
            "prompt": [
                "",
                [],
                [-1],
                [VOCAB_SIZE],
                [2**31],
                [2**63],
                [[]],
                None,
                {"a": 1},
                [5, "a"],
                [5] * MAX_MODEL_LEN,
            ],
            "logprobs": [-1, 21, True],
            "best_of": [7, 0],
            "suffix": ["end"],
        },
    ),
    "/v1/chat/completions": (
        {
            **SOUND,
            "messages": [
                [{"role": "user", "content": "Hello"}],
                [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
            ],
            "logprobs": [None, True],
            "top_logprobs": [None, 0, 3],
        },
        {
            **WRONG,
            "messages": [[], None, "Hello", [{"role": "judge", "content": "a"}], [{"role": "user"}]],
            "top_logprobs": [21, -1],
            "response_format": [{"type": "xml"}],
        },
    ),
}


def pairwise(features: Mapping[str, list[Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Rows in which every two values of two features meet at least once."""
    names = list(features)
    uncovered = {
        (first, i, second, j)
        for at, first in enumerate(names)
        for second in names[at + 1 :]
        for i in range(len(features[first]))
        for j in range(len(features[second]))
    }

    def pairs(row: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
        chosen = [name for name in names if name in row]
        return {(a, row[a], b, row[b]) for at, a in enumerate(chosen) for b in chosen[at + 1 :]}

    rows = []
    while uncovered:
        first, i, second, j = min(uncovered)
        row = {first: i, second: j}
        for name in rng.sample(names, len(names)):
            if name not in row:
                gains = [len(pairs({**row, name: k}) & uncovered) for k in range(len(features[name]))]
                row[name] = gains.index(max(gains))
        uncovered -= pairs(row)
        rows.append({name: features[name][row[name]] for name in names})
    return rows


def conflict(body: Mapping[str, Any]) -> str | None:
    """The parameter that a request of sound values is refused for."""
    if body["stream_options"] is not None and not body["stream"]:
        return "stream_options"
    if body["prompt_logprobs"] is not None and body["stream"]:
        return "prompt_logprobs"
    if body.get("top_logprobs") and not body["logprobs"]:
        return "top_logprobs"
    return None


def matrix(path: str, rng: random.Random) -> list[tuple[dict[str, Any], str | None]]:
    """Bodies, and the parameter that each is refused for; None is to be answered."""
    sound, wrong = KINDS[path]
    rows: list[tuple[dict[str, Any], str | None]] = []
    answered = []
    for row in pairwise(sound, rng):
        while (refused_for := conflict(row)) is not None:
            rows.append((row, refused_for))
            row = {**row, refused_for: None}
        answered.append(row)
    rows += [(row, None) for row in answered]
    whole_prompt = {"truncate_prompt_tokens": None}  # else a prompt that is too long would do
    for name, values in wrong.items():
        rows += [({**rng.choice(answered), **whole_prompt, name: value}, name) for value in values]
    return rows


@pytest.mark.parametrize("path", list(KINDS))
def test_fault_one_bad_request_leaves_the_engine_and_its_neighbours_alone(tiny_server: Server, path: str) -> None:
    """All at once, so that each also has the others for neighbours; two sound requests notice none of it."""
    seed = 6
    rng = random.Random(seed)
    rows = matrix(path, rng)
    rng.shuffle(rows)
    num_refused = sum(refused_for is not None for _, refused_for in rows)
    print(f"seed {seed}: {len(rows)} requests, {num_refused} of them to be refused")
    pid = tiny_server.engine_pid()
    watched = [tiny_server.body(PROMPT, 60), tiny_server.body(PROMPT, 60, **SEEDED)]
    alone = [tiny_server.post(body)["choices"][0]["token_ids"] for body in watched]

    async def run() -> list[Answer]:
        async with async_client(tiny_server) as client:
            whole = asyncio.gather(*(stream_answer(client, body) for body in watched))
            await asyncio.gather(*(_check(client, path, body, refused_for) for body, refused_for in rows))
            return await whole

    assert [answer.token_ids for answer in asyncio.run(run())] == alone
    assert tiny_server.engine_pid() == pid
    assert [tiny_server.post(body)["choices"][0]["token_ids"] for body in watched] == alone
    tiny_server.until_idle()


async def _check(client: httpx.AsyncClient, path: str, body: dict[str, Any], refused_for: str | None) -> None:
    fields = {name: value for name, value in body.items() if value is not None or name == refused_for}
    content = json.dumps({"model": "tiny", **fields})  # NaN and Infinity as Python writes them
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    shown = f"{content[:2000]} -> {response.text[:2000]}"
    if refused_for is not None:
        assert response.status_code == 400, shown
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, shown
        if "NaN" not in content and "Infinity" not in content:  # these are no JSON, so no field is at fault
            assert error["param"].startswith(refused_for), shown
        return
    assert response.status_code == 200, shown
    prompts = body["prompt"] if "prompt" in body and isinstance(body["prompt"][0], (str, list)) else [None]
    num_choices = (body["n"] or 1) * (1 if isinstance(body.get("prompt"), str) else len(prompts))
    if not body["stream"]:
        reasons = [choice["finish_reason"] for choice in response.json()["choices"]]
    else:
        *frames, done = response.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]", shown
        chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        assert not any("error" in chunk for chunk in chunks), shown
        ends = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
        reasons = [ends[index] for index in sorted(ends)]
    assert len(reasons) == num_choices, shown
    assert set(reasons) <= {"stop", "length"}, shown
