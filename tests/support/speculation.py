"""Engine cores with and without drafts over real forwards on the CPU, and what requests get from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tessera.app.generate.generation import Choice, TextOptions
from tessera.app.text.detokenizer import Detokenizer
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, RequestOutput, TokenLogprobs, rows_of
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import StepBatch, TokenMask
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.drafters.make import make_drafter
from tessera.engine.grammar.compiler import GrammarCompiler
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner, RunningStep
from tessera.engine.tensor import CPU
from tests.support.cases.token_ids import token_ids

CLIENT = b"client"
METHODS: tuple[dict[str, Any], ...] = (
    {"speculation": "on", "speculative_method": "ngram", "prompt_lookup_min": 1},
    {"speculation": "on", "speculative_method": "suffix"},
    {"speculation": "auto", "speculative_method": "suffix"},
)


@dataclass
class Asked:
    """A request of one sequence, whose text ends at the first of `stops`."""

    prompt: list[int]
    params: SamplingParams
    prediction: list[int] | None = None
    adapter: str = ""
    stops: tuple[str, ...] = ()


@dataclass
class Told:
    """The engine's answer to a request, and its `text`, where texts are made.

    Attributes:
        text_ids: tokens of the text.
        text_offsets: where each token with a log-probability begins in it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    last: RequestOutput | None = None
    choice: Choice | None = None
    text: str = ""
    text_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)

    def note_output(self, output: RequestOutput) -> bool:
        """-> whether the text has ended, and the engine has not."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = rows_of(output.prompt_logprobs)
        self.last = output
        if self.choice is None:
            return False
        delta = self.choice.advance(output)
        if delta is not None:
            self.text += delta.text
            self.text_ids += delta.token_ids
            self.text_offsets += [entry.text_offset for entry in delta.entries]
        return self.choice.finish_reason is not None and output.finish_reason is None


class RunsAhead:
    """Takes a step before the result of the one before, as a GPU's runner does."""

    asynchronous = True
    num_awaited_graphs = 0

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.full_sizes = runner.full_sizes

    def start(self, batch: StepBatch) -> RunningStep:
        return self._runner.start(batch)

    def sample(self, running: RunningStep, mask: TokenMask | None) -> None:
        self._runner.sample(running, mask)


def make_runner(folder: Path, **settings: Any) -> ModelRunner:
    """On the CPU, with the draft model that the settings ask for."""
    config = make_config(folder, **settings)
    model, ops = load_config(folder), make_ops(CPU)
    drafter = make_drafter(config.with_device_defaults("cpu"), model, ops)
    return ModelRunner(config, model, CPU, ops, drafter=drafter)


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    limits: dict[str, Any] = {"block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_kv_blocks": 256}
    return EngineConfig(model=str(folder), **{**limits, **settings})


def make_core(
    folder: Path,
    runner: ModelRunner | None = None,
    *,
    grammars: GrammarCompiler | None = None,
    ahead: bool = False,
    **settings: Any,
) -> EngineCore:
    """An engine on the CPU; `runner`: one that was made with settings as large, and with as many sequences where it
    has a draft model."""
    config = make_config(folder, **settings)
    runner = make_runner(folder, **settings) if runner is None else runner
    drafter, drafts = runner.drafter, config.speculation_settings
    assert drafter is None or isinstance(drafter, DraftModel)
    limits = None
    if drafter is not None and drafts is not None and drafts.uses_model:
        limits = drafter.limits
        if drafts.reads_states:  # the runner may have been made for more tokens
            limits = replace(limits, caught_up=1 + drafts.num_tokens)
    return EngineCore(
        config.with_device_defaults("cpu"),
        RunsAhead(runner) if ahead else runner,
        vocab_size=runner.model.vocab_size,
        max_model_len=runner.max_model_len,
        num_kv_blocks=config.num_kv_blocks or runner.num_kv_blocks,
        eos_token_ids=runner.model.eos_token_ids,
        short_rope_len=runner.short_rope_len,
        grammars=grammars,
        draft_limits=limits,
        begin_draft=drafter.begin if limits is not None and drafter is not None else None,
    )


def ask_all(
    core: EngineCore,
    requests: list[Asked],
    *,
    at_once: int = 100,
    detokenizer: Callable[[], Detokenizer] | None = None,
) -> list[Told]:
    """The answers, the first `at_once` requests being sent together and the others one in each step; with texts where
    there are detokenizers."""
    told = {str(number): Told() for number in range(len(requests))}
    if detokenizer is not None:
        for asked, each in zip(requests, told.values(), strict=True):
            params = asked.params
            options = TextOptions(asked.stops, False, params.min_tokens, params.logprobs is not None)
            each.choice = Choice(0, detokenizer(), options)
    waiting = list(enumerate(requests))
    while waiting or core.has_work:
        for number, asked in waiting[:at_once]:
            prediction = token_ids(asked.prediction) if asked.prediction is not None else None
            request = AddRequest(
                str(number),
                token_ids(asked.prompt),
                asked.params,
                0.0,
                prediction_token_ids=prediction,
                adapter=asked.adapter,
            )
            core.add_request(request, CLIENT)
        del waiting[:at_once]
        at_once = 1
        for output in core.step().get(CLIENT, []):
            if told[output.request_id].note_output(output):
                core.abort([output.request_id], CLIENT)
    return list(told.values())


def predicted(asked: list[Asked], expected: list[Told]) -> list[Asked]:
    """The requests with predictions that are right but for some tokens, as random models seldom repeat themselves."""
    found = []
    for number, (each, told) in enumerate(zip(asked, expected, strict=True)):
        prediction = list(told.token_ids)
        for place in range(3 + number, len(prediction), 8):
            prediction[place : place + 1] = [[], [3], [3, 4]][place % 3]
        found.append(replace(each, prediction=prediction if number % 4 else None))
    return found


def num_accepted(told: list[Told]) -> int:
    return sum(each.last.num_accepted_draft_tokens for each in told if each.last is not None)


def num_drafted(told: list[Told]) -> int:
    return num_accepted(told) + sum(each.last.num_rejected_draft_tokens for each in told if each.last is not None)


def repeated(seed: int, vocab_size: int, length: int) -> list[int]:
    """A prompt in which whatever comes has come before."""
    rng = random.Random(seed)
    phrase = [rng.randrange(3, vocab_size) for _ in range(7)]
    return [1, *phrase * (length // 7), *phrase[: length % 7]]


def varied_requests(vocab_size: int, max_tokens: int) -> list[Asked]:
    """Greedy and sampled, plain and with every adjustment and filter."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": {4: 2.0, 9: -3.0}},
        {"temperature": 0.7, "seed": 11, "top_p": 0.9},
        {"temperature": 0.4, "seed": 12, "top_k": 5, "min_p": 0.05, "logprobs": 0},
        {"temperature": 1.0, "seed": 13, "top_n_sigma": 1.0, "presence_penalty": 1.0, "min_tokens": 9},
        {"temperature": 0.3, "seed": 14, "stop_token_ids": (7, 8)},
        {"temperature": 0.0, "bad_words": ((5, 6), (9,)), "allowed_token_ids": tuple(range(3, 60))},
    ]
    return [
        Asked(repeated(number // 2, vocab_size, 20 + 3 * number), SamplingParams(max_tokens=max_tokens, **each))
        for number, each in enumerate(settings)
    ]


def assert_same(told: list[Told], expected: list[Told]) -> None:
    for one, other in zip(told, expected, strict=True):
        if one.choice is not None and one.choice.stop_string is not None:
            assert_same_texts(one, other)
            continue
        assert one.token_ids == other.token_ids
        assert one.last is not None
        assert other.last is not None
        assert (one.last.finish_reason, one.last.stop_token_id) == (other.last.finish_reason, other.last.stop_token_id)
        assert_same_logprobs(one.logprobs, other.logprobs)
        assert_same_logprobs(one.prompt_logprobs or [], other.prompt_logprobs or [])
        assert_same_texts(one, other)


def assert_same_texts(one: Told, other: Told) -> None:
    """Behind a stop string the engine may have said more."""
    if one.choice is None or other.choice is None:
        return
    assert (one.text, one.text_ids, one.text_offsets) == (other.text, other.text_ids, other.text_offsets)
    assert one.choice.stop_string == other.choice.stop_string
    assert (one.choice.finish_reason, one.choice.num_tokens) == (other.choice.finish_reason, other.choice.num_tokens)


def assert_same_logprobs(some: list[TokenLogprobs], others: list[TokenLogprobs]) -> None:
    assert [each.token_id for each in some] == [each.token_id for each in others]
    for one, other in zip(some, others, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len(one.top_token_ids) == len(other.top_token_ids)


@contextmanager
def watched_drafts(drafter: DraftModel, core: EngineCore) -> Iterator[list[tuple[list[int], list[int]]]]:
    """The tokens of the one running sequence before each draft, and the draft's."""
    found: list[tuple[list[int], list[int]]] = []
    draft = drafter.draft

    def watch(steps: Any) -> Any:
        download = draft(steps)
        [sequence] = core.scheduler.running
        found.append((sequence.token_ids.tolist(), download.result()[: len(steps), sequence.slot].tolist()))
        return download

    drafter.draft = watch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        drafter.draft = draft  # type: ignore[method-assign]
