"""Continuous batching, prefix cache, chunked prefill and preemption with real models: none changes a token."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, RequestOutput
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tessera.engine.tensor import CPU
from tests.support.fakes.fake_runner import check_blocks
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build
from tests.support.servers.server_fixture import Answer, Server, async_client, running_server, stream_answer

NUM_REQUESTS = 32
NUM_ENTRANCES = 8  # requests that begin at once; every other one waits for an earlier one's first token
CLIENT = b"test"

# -- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture(params=["tiny", pytest.param("stories260K", marks=pytest.mark.shared)])
def server(request: pytest.FixtureRequest) -> Server:
    name = {"tiny": "tiny_server", "stories260K": "story_server"}[request.param]
    found: Server = request.getfixturevalue(name)
    return found


def mixed_requests(server: Server) -> list[dict[str, Any]]:
    """Prompts and answers of different lengths, two thirds of them greedy; each with a cache of its own."""
    rng = random.Random(1)
    requests = []
    for index in range(NUM_REQUESTS):
        token_ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        sampling = {"temperature": 1.0, "seed": index} if index % 3 == 2 else {}
        requests.append(server.body(token_ids, rng.randint(8, 40), cache_salt=f"alone {index}", **sampling))
    return requests


async def in_company(server: Server, requests: list[dict[str, Any]]) -> list[Answer]:
    """All requests, request i entering when request i - NUM_ENTRANCES has had its first token."""
    begun = [asyncio.Event() for _ in requests]

    async def take_part(index: int) -> Answer:
        if index >= NUM_ENTRANCES:
            await begun[index - NUM_ENTRANCES].wait()
        body = {**requests[index], "cache_salt": f"together {index}"}
        return await stream_answer(client, body, begun[index])

    async with async_client(server) as client:
        return list(await asyncio.gather(*map(take_part, range(len(requests)))))


def test_32_requests_at_different_times_give_what_each_gives_alone(server: Server) -> None:
    requests = mixed_requests(server)

    async def one_after_another() -> list[Answer]:
        async with async_client(server) as client:
            return [await stream_answer(client, request) for request in requests]

    num_steps, start = server.num_steps(), time.perf_counter()
    alone = asyncio.run(one_after_another())
    num_alone, seconds_alone = server.num_steps() - num_steps, time.perf_counter() - start
    num_steps, start = server.num_steps(), time.perf_counter()
    together = asyncio.run(in_company(server, requests))
    num_together, seconds_together = server.num_steps() - num_steps, time.perf_counter() - start

    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [len(answer.token_ids) for answer in alone] == [request["max_tokens"] for request in requests]
    assert num_alone == sum(request["max_tokens"] for request in requests), "alone, each token takes a step"
    assert num_together < num_alone / 3
    print(
        f"\n{server.model}: {NUM_REQUESTS} requests one after another {seconds_alone:.2f} s in {num_alone} steps, "
        f"in company {seconds_together:.2f} s in {num_together} steps: "
        f"{seconds_together / seconds_alone:.0%} of the time, {num_together / num_alone:.0%} of the steps"
    )


def test_a_request_joins_while_another_decodes(tiny_server: Server) -> None:
    """The short one's tokens are computed in steps that the long one takes anyway."""
    long = tiny_server.body([9, 8, 7], 300, cache_salt="long")
    short = tiny_server.body([70, 60, 50, 40], 10, temperature=1.0, seed=1, cache_salt="short")
    expected = [tiny_server.tokens([9, 8, 7], 300), tiny_server.tokens([70, 60, 50, 40], 10, temperature=1.0, seed=1)]
    ended: list[str] = []

    async def run() -> list[Answer]:
        begun = asyncio.Event()

        async def first() -> Answer:
            answer = await stream_answer(client, long, begun)
            ended.append("long")
            return answer

        async def second() -> Answer:
            await begun.wait()
            answer = await stream_answer(client, short)
            ended.append("short")
            return answer

        async with async_client(tiny_server) as client:
            return list(await asyncio.gather(first(), second()))

    num_steps = tiny_server.num_steps()
    answers = asyncio.run(run())
    assert ended == ["short", "long"]
    assert [answer.token_ids for answer in answers] == expected
    assert tiny_server.num_steps() - num_steps == 300


@pytest.fixture(scope="module")
def cramped_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for 128 tokens in all, 16 tokens a step."""
    log_file = tmp_path_factory.mktemp("logs") / "cramped.log"
    sizes = ("--num-kv-blocks", "16", "--block-size", "8", "--max-num-batched-tokens", "16", "--max-num-seqs", "6")
    with running_server(tiny_folder, log_file, *sizes) as server:
        yield server


def test_a_cramped_server_gives_the_same_tokens(tiny_server: Server, cramped_server: Server) -> None:
    rng = random.Random(2)
    beginning = [rng.randrange(3, VOCAB_SIZE) for _ in range(24)]
    requests = [
        cramped_server.body(
            beginning + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 20))],
            rng.randint(20, 50),
            **({"temperature": 1.0, "seed": index} if index % 2 else {}),
        )
        for index in range(10)
    ]
    expected = [tiny_server.post({**request, "cache_salt": str(i)}) for i, request in enumerate(requests)]

    async def run() -> list[Answer]:
        async with async_client(cramped_server) as client:
            return list(await asyncio.gather(*(stream_answer(client, request) for request in requests)))

    for round_number in range(2):
        before = cramped_server.metrics()
        answers = asyncio.run(run())
        assert [answer.token_ids for answer in answers] == [answer["choices"][0]["token_ids"] for answer in expected]
        after = cramped_server.metrics()
        preempted, found = (after[name] - before[name] for name in ("num_preemptions_total", "prefix_cache_hits_total"))
        assert preempted > 0, f"round {round_number}"
        assert found > 0, f"round {round_number}"
    # Prompts of 25 to 44 tokens in steps of at most 16: every one was chunked.
    assert after['iteration_tokens_total_bucket{le="16.0",}'] == after["iteration_tokens_total_count"]
    cramped_server.until_idle()


def test_a_cached_prefix_is_reported_and_changes_nothing(tiny_server: Server) -> None:
    rng = random.Random(3)
    token_ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    fresh = tiny_server.post(tiny_server.body(token_ids, 12, cache_salt="prefix"))
    again = tiny_server.post(tiny_server.body(token_ids, 12, cache_salt="prefix"))
    longer = tiny_server.post(
        tiny_server.body([*token_ids, *fresh["choices"][0]["token_ids"][:6]], 6, cache_salt="prefix")
    )
    other_salt = tiny_server.post(tiny_server.body(token_ids, 12, cache_salt="other"))
    cached = [
        answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (fresh, again, longer, other_salt)
    ]
    assert cached == [0, 64, 64, 0]  # whole blocks of 16 tokens
    expected = fresh["choices"][0]["token_ids"]
    assert again["choices"][0]["token_ids"] == other_salt["choices"][0]["token_ids"] == expected
    assert longer["choices"][0]["token_ids"] == expected[6:]


# -- the engine in this process, step by step -----------------------------------------------------


@dataclass
class Trace:
    """What a run of an engine did on its way to its tokens."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0


def load_core(folder: Path, **settings: Any) -> EngineCore:
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", block_size=8, **settings)
    core = load_engine(config, lambda stage, done, total: None).core
    assert isinstance(core, EngineCore)
    return core


def requests_of(seed: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts with common beginnings; prompt and answer fill at most the 64 positions of the tiny models."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, VOCAB_SIZE) for _ in range(20)] for _ in range(2)]
    requests = {}
    for index in range(9):
        tail = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 18))]
        token_ids = rng.choice([*beginnings, []]) + tail
        sampling: dict[str, Any] = {"temperature": 0.0}
        if index % 3 == 1:
            sampling = {"temperature": 1.0, "seed": index, "top_p": 0.95}
        elif index % 3 == 2:
            sampling = {"temperature": 1.2, "seed": index, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
        params = SamplingParams(max_tokens=rng.randint(8, 20), ignore_eos=True, **sampling)
        requests[f"r{index}"] = (token_ids, params)
    return requests


def run_steps(core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]], stagger: int) -> Trace:
    """Run to the end, a request entering every `stagger` steps (0: all at once); blocks checked after each."""
    trace = Trace({name: [] for name in requests})
    coming = list(requests.items())
    num_steps = 0
    while coming or core.has_work:
        if coming and (stagger == 0 or num_steps % stagger == 0):
            name, (token_ids, params) = coming.pop(0)
            core.add_request(AddRequest(name, array("i", token_ids), params, time.monotonic()), CLIENT)
            if stagger == 0:
                continue
        num_steps += 1
        step = core.schedule()
        if step is None:
            continue
        trace.num_preemptions += len(step.preempted)
        trace.num_chunks += len(step.sequences) - len(step.sampled)
        outputs: defaultdict[bytes, list[RequestOutput]] = defaultdict(list)
        core.postprocess(step, core._runner.start(step.batch).result(), outputs)
        check_blocks(core)
        for output in outputs.get(CLIENT, []):
            assert output.error is None
            trace.token_ids[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                trace.num_cached_tokens += output.num_cached_tokens
    assert core.stats().num_used_blocks == 0
    return trace


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "qwen2-window", "smollm3", "gpt2")
    return {name: build(TINY_MODELS[name], tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "smollm3", "gpt2"])
def test_fault_batch_dependence_no_way_of_scheduling_changes_a_token(folders: dict[str, Path], name: str) -> None:
    """Small steps, few blocks, prefix cache or none: as many tokens, and the same, as each request alone."""
    folder, requests = folders[name], requests_of(seed=4)
    core = load_core(folder, num_kv_blocks=64, prefix_caching=False)
    alone: dict[str, list[int]] = {}
    for request_id, request in requests.items():
        alone |= run_steps(core, {request_id: request}, stagger=0).token_ids
    assert {request_id: len(token_ids) for request_id, token_ids in alone.items()} == {
        request_id: params.max_tokens for request_id, (_, params) in requests.items()
    }
    for prefix_caching in (True, False):
        for num_kv_blocks, max_num_batched_tokens, stagger in ((64, 1024, 2), (64, 5, 1), (11, 1024, 1), (9, 7, 0)):
            core = load_core(
                folder,
                num_kv_blocks=num_kv_blocks,
                max_num_seqs=5,
                max_num_batched_tokens=max_num_batched_tokens,
                prefix_caching=prefix_caching,
            )
            trace = run_steps(core, requests, stagger)
            assert trace.token_ids == alone
            assert (trace.num_preemptions > 0) == (num_kv_blocks < 64)
            assert (trace.num_chunks > 0) == (max_num_batched_tokens < 1024)
            assert (trace.num_cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
@pytest.mark.parametrize("num_kv_blocks", [64, 11])
def test_one_step_ahead_changes_no_token(
    folders: dict[str, Path], name: str, num_kv_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU poses as a device that works on its own: steps are submitted before the last one's tokens are known."""
    requests = requests_of(seed=5)
    expected = run_steps(load_core(folders[name], num_kv_blocks=64), requests, stagger=2).token_ids
    monkeypatch.setattr(CPU, "asynchronous", True)
    core = load_core(folders[name], num_kv_blocks=num_kv_blocks, max_num_seqs=5, max_num_batched_tokens=30)
    found: dict[str, list[int]] = {request_id: [] for request_id in requests}
    coming = list(requests.items())
    most_in_flight = num_calls = 0
    while coming or core.has_work:
        num_calls += 1
        assert num_calls < 2000, "still not done"
        if coming and num_calls % 3 == 0:
            request_id, (token_ids, params) = coming.pop(0)
            core.add_request(AddRequest(request_id, array("i", token_ids), params, time.monotonic()), CLIENT)
        for output in core.step().get(CLIENT, []):
            assert output.error is None
            found[output.request_id] += output.token_ids
        most_in_flight = max(most_in_flight, len(core._in_flight))
        check_blocks(core)
    assert found == expected
    assert most_in_flight == 1, "each step was taken while the next had been submitted"
    assert core.stats().num_used_blocks == 0
