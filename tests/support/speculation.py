"""Engine cores with and without drafts over real forwards on the CPU, and what requests get from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, RequestOutput, TokenLogprobs
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU
from tests.support.token_ids import token_ids

CLIENT = b"client"
METHODS: tuple[dict[str, Any], ...] = (
    {"speculation": "on", "speculative_method": "ngram", "prompt_lookup_min": 1},
    {"speculation": "on", "speculative_method": "suffix"},
    {"speculation": "auto", "speculative_method": "suffix"},
)


@dataclass
class Asked:
    """A request of one sequence."""

    prompt: list[int]
    params: SamplingParams
    prediction: list[int] | None = None


@dataclass
class Told:
    """What it got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: RequestOutput | None = None


def make_core(folder: Path, runner: ModelRunner | None = None, **settings: Any) -> EngineCore:
    """An engine on the CPU; `runner`: one that was made with settings as large."""
    limits: dict[str, Any] = {"block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_kv_blocks": 256}
    config = EngineConfig(model=str(folder), **{**limits, **settings})
    model = load_config(folder)
    runner = ModelRunner(config, model, CPU, make_ops(CPU)) if runner is None else runner
    return EngineCore(
        config.with_device_defaults("cpu"),
        runner,
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        num_kv_blocks=config.num_kv_blocks or runner.num_kv_blocks,
        eos_token_ids=model.eos_token_ids,
        short_rope_len=runner.short_rope_len,
    )


def ask_all(core: EngineCore, requests: list[Asked], *, at_once: int = 100) -> list[Told]:
    """The answers, the first `at_once` requests being sent together and the others one in each step."""
    told = {str(number): Told() for number in range(len(requests))}
    waiting = list(enumerate(requests))
    while waiting or core.has_work:
        for number, asked in waiting[:at_once]:
            prediction = token_ids(asked.prediction) if asked.prediction is not None else None
            core.add_request(
                AddRequest(str(number), token_ids(asked.prompt), asked.params, 0.0, prediction_token_ids=prediction),
                CLIENT,
            )
        del waiting[:at_once]
        at_once = 1
        for output in core.step().get(CLIENT, []):
            told[output.request_id].token_ids += output.token_ids
            told[output.request_id].logprobs += output.logprobs or []
            told[output.request_id].last = output
    return list(told.values())


def predicted(asked: list[Asked], expected: list[Told]) -> list[Asked]:
    """The requests with predictions that are right but for some tokens, as random models seldom repeat themselves."""
    found = []
    for number, (each, told) in enumerate(zip(asked, expected, strict=True)):
        prediction = list(told.token_ids)
        for place in range(3 + number, len(prediction), 8):
            prediction[place : place + 1] = [[], [3], [3, 4]][place % 3]
        found.append(Asked(each.prompt, each.params, prediction if number % 4 else None))
    return found


def num_accepted(told: list[Told]) -> int:
    return sum(each.last.num_accepted_draft_tokens for each in told if each.last is not None)
