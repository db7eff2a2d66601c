"""What a request gets out of the engine: the same tokens whatever happens around it, and one end."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from tessera.engine.contract.errors import ContextLengthError, InvalidRequestError, QueueFullError, RequestError
from tessera.engine.contract.messages import AddRequest, RequestOutput
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch, StepResult
from tests.support.cases.token_ids import token_ids
from tests.support.fakes.fake_runner import CLIENT, NON_FINITE, VOCAB_SIZE, Harness, generate


def make_requests(seed: int, count: int = 32, longest: int = 40) -> dict[str, tuple[list[int], int, str]]:
    """Name -> prompt, max_tokens, salt; half of them begin with one of two shared prefixes."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1, 99) for _ in range(17)] for _ in range(2)]
    requests = {}
    for index in range(count):
        tail = [rng.randrange(1, 99) for _ in range(rng.randint(1, longest - 17))]
        prefix = rng.choice([*prefixes, [], []])
        requests[f"r{index}"] = (prefix + tail, rng.randint(1, 24), rng.choice(["", "", "salted"]))
    return requests


def test_a_request_alone_gives_what_the_model_says() -> None:
    for name, (prompt, max_tokens, salt) in make_requests(seed=1).items():
        engine = Harness()
        engine.add(name, prompt, max_tokens, cache_salt=salt)
        engine.run()
        assert (engine.token_ids[name], engine.finish_reasons[name]) == generate(prompt, max_tokens)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "budget"),
    [(512, 32, 512), (512, 32, 32), (17, 32, 64), (17, 12, 12), (17, 1, 1)],
    ids=["roomy", "chunked", "preempting", "both", "one-by-one"],
)
def test_32_requests_that_arrive_at_different_times_give_what_each_gives_alone(
    num_blocks: int, max_num_seqs: int, budget: int, prefix_caching: bool
) -> None:
    requests = make_requests(seed=1)
    engine = Harness(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    for name, (prompt, max_tokens, salt) in requests.items():
        engine.add(name, prompt, max_tokens, cache_salt=salt)
        engine.step()
    engine.run()
    for name, (prompt, max_tokens, _) in requests.items():
        assert (engine.token_ids[name], engine.finish_reasons[name]) == generate(prompt, max_tokens)
    stats = engine.core.stats()
    assert stats.num_used_blocks == 0
    if num_blocks < 32 and max_num_seqs > 1:
        assert engine.core.metrics.num_preemptions > 0
    if prefix_caching and num_blocks == 512:
        assert engine.core.metrics.num_prefix_hits > 0
    if not prefix_caching:
        assert engine.core.metrics.num_prefix_hits == stats.num_cached_blocks == 0


def test_a_request_joins_while_others_decode() -> None:
    engine = Harness()
    engine.add("first", [5, 6, 7], 8, ignore_eos=True)
    engine.step()
    engine.add("second", [8, 9, 10, 11], 8, ignore_eos=True)
    outputs = engine.step()[CLIENT]
    batch = engine.runner.last_batch
    assert batch is not None
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5]
    assert [output.request_id for output in outputs] == ["first", "second"]
    assert len(engine.token_ids["first"]) == 2


def test_the_second_request_reports_the_tokens_that_the_prefix_cache_spared() -> None:
    engine = Harness(block_size=4)
    prompt = list(range(1, 21))
    for name in ("first", "second"):
        engine.add(name, prompt, 3, ignore_eos=True)
        engine.run()
    assert engine.last_outputs["first"].num_cached_tokens == 0
    assert engine.last_outputs["second"].num_cached_tokens == 16, "the last block holds the last token"
    assert engine.token_ids["first"] == engine.token_ids["second"]


def test_end_ids_come_before_max_tokens_and_wait_for_min_tokens() -> None:
    prompt = [3, 1, 4]
    tokens, _ = generate(prompt, 5, stop_ids=())
    engine = Harness(eos_token_ids=[tokens[2]])
    engine.add("eos", prompt, 3)
    engine.add("ignored", prompt, 3, ignore_eos=True)
    engine.add("own", prompt, 5, stop_token_ids=(tokens[1],))
    engine.add("later", prompt, 5, stop_token_ids=(tokens[1],), min_tokens=2)
    engine.add("latest", prompt, 5, min_tokens=3)
    engine.run()
    assert engine.finish_reasons == {
        "eos": "stop",
        "ignored": "length",
        "own": "stop",
        "later": "stop",
        "latest": "length",
    }
    assert engine.token_ids["eos"] == tokens[:3]
    assert engine.token_ids["own"] == tokens[:2]
    assert engine.token_ids["later"] == tokens[:3]
    assert engine.last_outputs["eos"].stop_token_id == tokens[2]
    assert engine.last_outputs["own"].stop_token_id == tokens[1]
    assert engine.last_outputs["ignored"].stop_token_id is None


def test_logprobs_reach_only_those_who_asked() -> None:
    engine = Harness()
    engine.add("with", [1, 2], 1, logprobs=2)
    engine.add("without", [1, 2], 1)
    engine.run()
    logprobs = engine.last_outputs["with"].logprobs
    assert logprobs is not None
    assert logprobs[0].token_id == engine.token_ids["with"][0]
    assert len(logprobs[0].top_token_ids) == 2
    assert engine.last_outputs["without"].logprobs is None


def test_outputs_go_to_the_client_that_asked_even_under_equal_ids() -> None:
    engine = Harness()
    prompts = {b"one": [1, 2, 3], b"two": [4, 5, 6]}
    for client, prompt in prompts.items():
        request = AddRequest("same", token_ids(prompt), SamplingParams(max_tokens=1), 0.0)
        engine.core.add_request(request, client)
    outputs = engine.core.step()
    for client, prompt in prompts.items():
        assert [output.token_ids for output in outputs[client]] == [generate(prompt, 1)[0]]


def test_fault_nan_logits_end_that_request_alone_and_its_blocks_are_never_shared() -> None:
    engine = Harness(block_size=2)
    bad_prompt = [NON_FINITE, 1, 2, 3, 4]
    engine.add("bad", bad_prompt, 20, ignore_eos=True)
    engine.add("good", [5, 6, 7], 20, ignore_eos=True)
    engine.run()
    output = engine.last_outputs["bad"]
    assert (output.finish_reason, output.error_status, output.error_code) == ("error", 500, "engine_error")
    assert output.error is not None
    assert output.error_type == "server_error"
    assert output.token_ids == []
    assert engine.token_ids["bad"] == generate(bad_prompt, 20, stop_ids=())[0]
    assert (engine.token_ids["good"], engine.finish_reasons["good"]) == generate([5, 6, 7], 20, stop_ids=())
    engine.add("again", bad_prompt, 1)
    engine.run()
    assert engine.last_outputs["again"].num_cached_tokens == 0
    engine.add("good again", [5, 6, 7], 1)
    engine.run()
    assert engine.last_outputs["good again"].num_cached_tokens == 2


def test_an_abort_frees_everything_at_once_and_says_nothing_more() -> None:
    engine = Harness(num_blocks=8, max_num_seqs=1, prefix_caching=False)
    engine.add("running", list(range(1, 20)), 10, ignore_eos=True)
    engine.add("waiting", [1, 2], 10, ignore_eos=True)
    engine.step()
    assert engine.core.stats().num_used_blocks == 5
    engine.core.abort(["running", "unknown"], b"another client")
    assert engine.core.stats().num_used_blocks == 5, "a client can only abort its own"
    engine.core.abort(["running", "waiting", "unknown"], CLIENT)
    engine.check_blocks()
    assert engine.core.stats().num_free_blocks == 8
    assert not engine.core.has_work
    assert engine.step() == {}
    engine.add("running", [1, 2], 1)
    engine.run()
    assert engine.finish_reasons == {"running": "length"}


def test_what_an_aborted_request_had_computed_stays_in_the_prefix_cache() -> None:
    engine = Harness(block_size=4)
    prompt = list(range(1, 21))
    engine.add("aborted", prompt, 3, ignore_eos=True)
    engine.step()
    engine.core.abort(["aborted"], CLIENT)
    engine.add("next", prompt, 3, ignore_eos=True)
    engine.run()
    assert engine.last_outputs["next"].num_cached_tokens == 16


def test_the_answer_ends_where_the_context_does() -> None:
    engine = Harness(max_model_len=16)
    engine.add("r", list(range(1, 11)), 1000, ignore_eos=True)
    engine.run()
    assert len(engine.token_ids["r"]) == 6
    assert engine.finish_reasons["r"] == "length"


def test_the_answer_ends_where_the_whole_kv_cache_does() -> None:
    engine = Harness(num_blocks=4, block_size=4, max_model_len=256)
    for name in ("first", "second"):
        engine.add(name, list(range(1, 11)), 1000, ignore_eos=True)
    engine.run()
    assert [len(token_ids) for token_ids in engine.token_ids.values()] == [6, 6]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_model_len": 12}, "context length is 12 tokens, and the prompt is too long: 12 tokens > 11 maximum"),
        ({"num_blocks": 3}, "> 11 maximum. The server's KV cache holds no more"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once(limits: dict[str, Any], words: str) -> None:
    engine = Harness(block_size=4, **limits)
    with pytest.raises(ContextLengthError, match=words) as refusal:
        engine.add("r", [1] * 12)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "prompt")
    assert not engine.core.has_work
    engine.add("r", [1] * 11, 5)
    engine.run()
    assert engine.finish_reasons["r"] == "length"


@pytest.mark.parametrize("prompt", [[], [-1], [1, VOCAB_SIZE], [2**31], [2**63], [-(2**63)], [1, 2**32 + 1]])
def test_fault_token_ids_of_wrong_prompts_are_refused_and_leave_the_others_alone(prompt: list[int]) -> None:
    engine = Harness()
    engine.add("good", [1, 2, 3], 4, ignore_eos=True)
    engine.step()
    with pytest.raises(InvalidRequestError) as refusal:
        engine.add("bad", prompt)
    assert (refusal.value.status, refusal.value.param) == (400, "prompt")
    engine.run()
    assert engine.token_ids["good"] == generate([1, 2, 3], 4, stop_ids=())[0]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": float("inf")}, "top_p"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, object], param: str) -> None:
    engine = Harness()
    with pytest.raises(InvalidRequestError) as refusal:
        engine.add("bad", [1], **params)  # type: ignore[arg-type]
    assert refusal.value.param == param
    assert not engine.core.has_work


def test_a_request_id_in_use_is_refused_until_it_ends() -> None:
    engine = Harness()
    engine.add("r", [1, 2], 2, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add("r", [3, 4])
    engine.run()
    assert engine.token_ids["r"] == generate([1, 2], 2, stop_ids=())[0]
    engine.finish_reasons.clear()
    engine.add("r", [3, 4], 1)
    engine.run()


def test_beyond_the_queue_a_request_is_refused_with_a_time_to_come_back() -> None:
    engine = Harness(max_queue_len=3, max_num_seqs=1)
    for name in "abc":
        engine.add(name, [1, 2], 1)
    with pytest.raises(QueueFullError) as refusal:
        engine.add("d", [1, 2])
    assert (refusal.value.status, refusal.value.retry_after) == (429, 1)
    engine.step()
    engine.add("d", [1, 2], 1)
    with pytest.raises(RequestError):
        engine.add("wrong", [])
    engine.run()
    assert sorted(engine.finish_reasons) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("seconds_per_request", "expected"), [(0.01, 1), (4.0, 12), (1000.0, 60)])
def test_the_time_to_come_back_follows_the_recent_throughput(seconds_per_request: float, expected: int) -> None:
    engine = Harness(max_queue_len=3, max_num_seqs=1)
    for index in range(100):
        engine.add(f"done{index}", [1, 2], 1)
        engine.step(seconds_per_request)
    for name in "abc":
        engine.add(name, [1, 2], 1)
    engine.now += seconds_per_request
    with pytest.raises(QueueFullError) as refusal:
        engine.add("d", [1, 2])
    assert refusal.value.retry_after == expected


def test_lower_priority_numbers_run_first() -> None:
    engine = Harness(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
        engine.add(name, [1, 2], 1, priority=priority)
    engine.run()
    assert list(engine.finish_reasons) == ["d", "b", "a", "c"]


def test_a_fault_of_the_runner_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness()
    engine.add("r", [1, 2])

    def fail(batch: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.runner, "start", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()


def test_a_request_aborted_while_its_step_runs_gets_no_token() -> None:
    engine = Harness()
    engine.add("gone", [1, 2, 3])
    engine.add("stays", [4, 5, 6], 1)
    step = engine.core.schedule()
    assert step is not None
    result = engine.runner.execute(step.batch)
    engine.core.abort(["gone"], CLIENT)
    outputs: defaultdict[bytes, list[RequestOutput]] = defaultdict(list)
    engine.core.postprocess(step, result, outputs)
    assert [output.request_id for output in outputs[CLIENT]] == ["stays"]
    engine.check_blocks()
    assert engine.core.stats().num_used_blocks == 0


@pytest.mark.parametrize("awaited", [set(), {0}, {3}, {3, 4}, {7}], ids=str)
def test_a_steps_duration_is_the_devices_alone(awaited: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the wait behind the step before it, nor the time without work before it, counts, nor what it takes to
    capture the graph of an `awaited` step: the result of the step before is late then, and tells nothing."""
    engine = Harness(asynchronous=True)
    step_seconds, host_seconds, capture_seconds = 1.0, 0.125, 8.0
    device_free_at = 0.0
    num_started = 0
    start = engine.runner.start
    durations: list[float] = []

    @dataclass
    class Timed:
        done: Any
        ends_at: float

        def result(self) -> StepResult:
            engine.now = max(engine.now, self.ends_at)
            return self.done.result()

    def start_timed(batch: StepBatch) -> Timed:
        nonlocal device_free_at, num_started
        if num_started in awaited:
            engine.now += capture_seconds
            engine.runner.num_awaited_graphs += 1
        num_started += 1
        device_free_at = max(device_free_at, engine.now) + step_seconds
        return Timed(start(batch), device_free_at)

    monkeypatch.setattr(engine.runner, "start", start_timed)
    monkeypatch.setattr(engine.core.scheduler, "record_duration", lambda step, seconds: durations.append(seconds))
    for name in ("first", "second"):
        engine.add(name, [1, 2, 3], 5, ignore_eos=True)
        while engine.core.has_work:
            engine.step(host_seconds)
        engine.now += 50.0
    num_late = len(awaited - {0, 5})  # before these no step is in flight
    assert durations == [step_seconds] * (10 - num_late)
